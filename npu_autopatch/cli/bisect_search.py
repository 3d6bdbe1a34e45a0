"""The search of `bisect`: minimal sets of sites that fail, by as few runs as it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class Search:
    """Looks for the sites without which nothing fails.

    `fails` is asked with the sites that are to be patched, and is known to hold for all `sites` and for none. The
    first `shared` of them serve others: one of these that fails only along with another site is not to blame.
    `found` are the culprits so far, each a minimal set that fails by itself; among `suspects` is the next one.
    """

    def __init__(self, sites: Sequence[str], shared: int, fails: Callable[[frozenset[str]], bool]) -> None:
        self.sites = list(sites)
        self.shared = frozenset(sites[:shared])
        self.found: list[list[str]] = []
        self.suspects = list(sites)
        self._ask = fails
        self._known = {frozenset(sites): True, frozenset[str](): False}

    def run(self) -> None:
        """Find culprits until all other sites together pass. One among n takes ceil(log2 n) runs and two to confirm."""
        left = self.sites
        while self._fails(left):
            self.suspects = left
            culprit = self._minimal(left)
            self.found.append(culprit)
            skipped = blamed(culprit, self.shared)
            left = [site for site in left if site not in skipped]
        self.suspects = []

    def _minimal(self, failing: list[str]) -> list[str]:
        """The members of the shortest prefix that fails without which it would pass, found from its end."""
        needed: list[str] = []
        others = failing
        while not self._fails(needed) and others:
            passing, length = 0, len(others)
            serving = len(self.shared.intersection(others))
            # whatever more is needed is one of those that serve others, most likely
            middle = serving if needed and 0 < serving < length else length // 2
            while length - passing > 1:
                self.suspects = others[passing:length]
                subset = needed + others[:middle]
                if self._is_within_passing(subset) or not self._fails(subset):
                    passing = middle
                else:
                    length = middle
                middle = (passing + length) // 2
            needed.insert(0, others[length - 1])
            self.suspects = needed
            others = others[: length - 1]
        return needed

    def _fails(self, patched: Collection[str]) -> bool:
        key = frozenset(patched)
        if key not in self._known:
            self._known[key] = self._ask(key)
        return self._known[key]

    def _is_within_passing(self, patched: Collection[str]) -> bool:
        return any(not fails and known.issuperset(patched) for known, fails in self._known.items())


def blamed(culprit: list[str], shared: Collection[str]) -> list[str]:
    """What to skip of sites that fail together: not those that serve others, unless there is nothing else."""
    return [site for site in culprit if site not in shared] or culprit
