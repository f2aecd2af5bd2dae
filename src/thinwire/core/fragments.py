"""Fragments: a model that is sent in parts, each of which is due every H steps, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import nn
from torch.nn import Parameter

from thinwire.core.optimizer import Algorithm
from thinwire.errors import ConfigError, check_choice, check_whole_number
from thinwire.schedules import Staggered

FragmentLayout = Literal["balanced", "strided", "sequential"]


class Fragments(Algorithm):
    """Base of methods that send a model in fragments, one after the other.

    Args:
        arguments: further ones of `Algorithm` or `Wrapper`.
        H: steps between two rounds of one fragment.
        fragments: how many there are, or which parameters each one has.
        layout: how parameters are dealt to fragments where only their number is given.
        base: further settings of `Algorithm` or `Wrapper`.
    """

    sends_fragments = True

    def __init__(
        self, *arguments: Any, H: int, fragments: int | Sequence[Sequence[Parameter]], layout: FragmentLayout, **base: Any
    ):
        """Deal the parameters."""
        check_choice("layout", layout, get_args(FragmentLayout))
        self._by_hand = None if isinstance(fragments, int) else [list(some) for some in fragments]
        P = len(self._by_hand) if self._by_hand is not None else fragments
        self.layout: FragmentLayout = layout
        self._dealt: list[int] = []
        super().__init__(*arguments, H=Staggered(H, P), **base)  # type: ignore[arg-type]
        dealt = self.fragment_of()
        self.settings |= {"fragments": P, "layout": layout} if self._by_hand is None else {"fragments": dealt}

    def fragment_of(self) -> list[int]:
        """The fragment of each of `params()`. Those of a group that is added later do not move the ones that were there."""
        if len(self._dealt) != len(self._active):
            self._dealt = self._named() if self._by_hand is not None else self._deal()
        return self._dealt

    def _adopt(self, group: dict[str, Any]) -> None:
        super()._adopt(group)
        if self._dealt:  # not while the first groups come in, one by one
            self.fragment_of()  # refuses parameters that no fragment names

    def which(self, due: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of the parameters that these fragments have; none where there are fewer parameters than fragments."""
        return tuple(i for i, p in enumerate(self.fragment_of()) if p in due)

    def kinds_of_rounds(self) -> list[tuple[int, ...]]:
        """Each fragment has its own."""
        return [(p,) for p in range(self.schedule.fragments)]

    def _deal(self) -> list[int]:
        known, P, dealt = {id(p) for p in self._active}, self.schedule.fragments, []
        loads = [0] * P
        for group in self.param_groups:
            sizes = [p.numel() for p in group["params"] if id(p) in known]
            for size, p in zip(sizes, deal(sizes, P, self.layout, loads=loads, first=len(dealt)), strict=True):
                loads[p] += size
                dealt.append(p)
        return dealt

    def _named(self) -> list[int]:
        assert self._by_hand is not None
        named = [(id(x), p) for p, some in enumerate(self._by_hand) for x in some]
        found = dict(named)
        if len(found) != len(named):
            raise ConfigError("a parameter is in two fragments")
        known = {id(x) for x in self._active}
        unknown = [tuple(x.shape) for some in self._by_hand for x in some if id(x) not in known]
        if unknown:
            raise ConfigError(f"fragments name a parameter of shape {unknown[0]} that the optimizer does not train")
        missing = [tuple(x.shape) for x in self._active if id(x) not in found]
        if missing:
            raise ConfigError(f"no fragment names the parameter of shape {missing[0]} ({len(missing)} missing in all)")
        return [found[id(x)] for x in self._active]


def deal(
    sizes: Sequence[int], P: int, layout: FragmentLayout, *, loads: Sequence[int] | None = None, first: int = 0
) -> list[int]:
    """The fragment of each tensor.

    Args:
        sizes: number of elements of each.
        P: number of fragments.
        layout: "balanced" puts the largest tensors first, each into the fragment that is smallest by then; "strided" puts
            tensor i into fragment i mod P; "sequential" cuts the list into P runs of about the same size.
        loads: elements that each fragment has already.
        first: tensors that have been dealt already.

    >>> deal([4, 1, 1, 2], 2, "balanced"), deal([4, 1, 1, 2], 2, "strided"), deal([4, 1, 1, 2], 2, "sequential")
    ([0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1])
    """
    if layout == "strided":
        return [(first + i) % P for i in range(len(sizes))]
    if layout == "sequential":
        ends, total = [sum(sizes[: i + 1]) for i in range(len(sizes))], max(1, sum(sizes))
        return [min(P - 1, P * (2 * end - size) // (2 * total)) for end, size in zip(ends, sizes, strict=True)]
    held, dealt = list(loads or [0] * P), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        dealt[i] = held.index(min(held))
        held[dealt[i]] += sizes[i]
    return dealt


def block_fragments(model: nn.Module, P: int) -> list[list[Parameter]]:
    """Fragments of transformer blocks, as in the paper: block i goes to fragment i mod P.

    The blocks are the members of the first `nn.ModuleList` or `nn.Sequential` inside the model. All other parameters, such as
    embeddings and heads, go to the fragment that is smallest then.

    Args:
        model: with a list of blocks.
        P: number of fragments, at most that of the blocks.

    Returns:
        What `fragments=` of `StreamingDiLoCo` takes: the parameters of each fragment.
    """
    check_whole_number("P", P)
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and m is not model)
    blocks = next(lists, None)
    if blocks is None:
        raise ConfigError(f"{type(model).__name__} has no list of blocks: give fragments as a number, or make them by hand")
    if len(blocks) < P:
        raise ConfigError(f"P must be at most the number of blocks, {len(blocks)}, got {P}")
    fragments: list[list[Parameter]] = [[] for _ in range(P)]
    taken: set[int] = set()
    for i, block in enumerate(blocks):
        for x in block.parameters():
            if x.requires_grad and id(x) not in taken:
                fragments[i % P].append(x)
                taken.add(id(x))
    smallest = min(fragments, key=lambda some: sum(x.numel() for x in some))
    smallest += [x for x in model.parameters() if x.requires_grad and id(x) not in taken]
    return fragments
