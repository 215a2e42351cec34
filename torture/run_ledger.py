"""What a run has to hold, by what its loop told before it died: a naive model that knows no file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, TypeAlias

__all__ = ["Ledger", "Rules", "Save", "Steps", "differences", "kept"]

Steps: TypeAlias = Mapping[int, int]
"""Step -> the branch of the training whose state it holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which steps are kept."""

    last: int
    """So many of the newest."""
    every: int
    """Those that so many divide."""
    best: int
    """So many of the lowest losses."""
    loss: Callable[[int], float]
    """The loss of a step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save that the loop has begun."""

    step: int
    branch: int
    overwrite: bool
    """It takes the place of that step and of all later ones."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a loop told.

    Example:
        >>> told = ["begun 0", "save 1 0 0", "skipped 1", "save 2 0 0", "save 4 0 0", "acknowledged 2"]
        >>> ledger = Ledger.of(told)
        >>> [save.step for save in ledger.saves], ledger.acknowledged, ledger.begun
        ([2, 4], 1, True)
    """

    saves: Sequence[Save]
    """In their order."""
    acknowledged: int
    """So many of them, the first ones."""
    begun: bool
    """The loop came to its first step."""

    @classmethod
    def of(cls, told: Iterable[str]) -> Self:
        """Read what the loop told.

        Raises:
            ValueError: it acknowledged in another order than it saved.
        """
        saves: list[Save] = []
        acknowledged = 0
        begun = False
        for line in told:
            word, *numbers = line.split()
            if word == "begun":
                begun = True
            elif word == "save":
                step, branch, overwrite = map(int, numbers)
                saves.append(Save(step=step, branch=branch, overwrite=bool(overwrite)))
            elif word == "skipped":
                saves.pop()
            else:
                if acknowledged >= len(saves) or saves[acknowledged].step != int(numbers[0]):
                    raise ValueError(f"out of order: {line}")
                acknowledged += 1
        return cls(saves=saves, acknowledged=acknowledged, begun=begun)

    def wrong(self, before: Steps, found: Steps, rules: Rules) -> list[str]:
        """Say what is wrong with the steps that were found; nothing where they are what they may be.

        A save is committed by one step, and what the rules do not keep goes afterwards, step by step. So for one number
        of committed saves, not less than were acknowledged, all is there that has to be kept, and nothing that is not
        known. What was acknowledged last has had its removals done. Later steps that were left behind by going back go
        with the commit.
        """
        problems = []
        has, may = dict(before), dict(before)
        for committed in range(len(self.saves) + 1):
            if committed:
                save = self.saves[committed - 1]
                may = {**has, save.step: save.branch}
                may = {step: may[step] for step in may if not save.overwrite or step <= save.step}
                has = kept(may, rules)
            if committed < self.acknowledged:
                continue
            exactly = has if committed == self.acknowledged else may
            if not (problem := differences(has, exactly, found)):
                return []
            problems.append(f"after {committed} saves: {problem}")
        return [f"{self.acknowledged} of {len(self.saves)} saves acknowledged; " + "; ".join(problems)]

    def after(self, before: Steps, rules: Rules) -> dict[int, int]:
        """Return what has to be there when all saves have ended well."""
        has = dict(before)
        for save in self.saves:
            has = {step: has[step] for step in has if not save.overwrite or step < save.step}
            has = kept({**has, save.step: save.branch}, rules)
        return has


def kept(steps: Steps, rules: Rules) -> dict[int, int]:
    """Return the steps that the rules keep.

    Example:
        >>> kept(dict.fromkeys(range(1, 12), 0), Rules(last=2, every=5, best=1, loss=lambda step: abs(step - 3)))
        {3: 0, 5: 0, 10: 0, 11: 0}
    """
    newest = sorted(steps)[-rules.last :]
    best = sorted(steps, key=lambda step: (rules.loss(step), -step))[: rules.best]
    if any(math.isnan(rules.loss(step)) for step in steps):
        raise ValueError("no loss of this training is nan")
    return {step: steps[step] for step in sorted(steps) if step in newest or step in best or step % rules.every == 0}


def differences(has: Steps, may: Steps, found: Steps) -> str:
    """Say what is missing or too much, as text; none where nothing is.

    Example:
        >>> differences({1: 0}, {1: 0, 2: 0}, {1: 0, 2: 0}), differences({1: 0}, {1: 0}, {2: 0})
        ('', 'lacks step 1; has step 2')
    """
    lacking = [f"lacks step {step}" for step in has if step not in found]
    other = [f"step {step} is of branch {found[step]}" for step in has if found.get(step, has[step]) != has[step]]
    extra = [f"has step {step}" for step in found if step not in has and may.get(step) != found[step]]
    return "; ".join([*lacking, *other, *extra])
