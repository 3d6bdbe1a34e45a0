"""A model taken apart into the chains of ops that a fused op can serve, with what each costs before and after."""
