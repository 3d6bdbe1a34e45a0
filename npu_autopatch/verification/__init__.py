"""A model run small, unpatched and patched, and both measured against fp64, as a whole and site by site."""
