"""A backward in two parts: first the gradients of a stage's inputs, later those of its parameters.

[Note: the split] The nodes of a graph from which an input of the stage can be reached run in the first part. Where an
edge leaves them for parameters, the gradient at its node is noted down; the second part enters the graph there again
and goes on to the parameters alone, of a matrix product that is its other half. (Qi et al. 2024, Zero Bubble Pipeline
Parallelism.) `torch.distributed.pipelining` has the same for itself, under private names; it sets `.grad` by hand, so
that nobody who waits for gradients hears of them. Here they arrive as in any backward.

The graph is kept between the parts, with what it saved. Checkpointed layers are recomputed in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node


@dataclass(eq=False)
class _EntryNode:
    """A node at which the second part enters, and the gradients that the first brought there."""

    node: Node
    gradients: tuple[torch.Tensor | None, ...] = ()


@dataclass(eq=False)
class _ParameterGroup:
    """Parameters that are reached from the same entries."""

    entries: list[_EntryNode] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


class _SingleBackward(torch.autograd.Function):
    """One backward around several, so that whoever looks for its end sees one."""

    @staticmethod
    def forward(ctx: Any, run: Any, anchor: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


class SplitBackward:
    """The backward of one stage for one micro-batch, in two parts: `inputs`, then `run`.

    Args:
        edges: where gradients enter the stage's graph.
        seeds: the gradients.
        leaves: what the stage was given and needs gradients of; `inputs` puts these into their `.grad`. Where there
            are none, everything is left to the second part.
    """

    def __init__(
        self, edges: list[GradientEdge], output_gradients: list[torch.Tensor], input_leaves: list[torch.Tensor]
    ) -> None:
        self._edges, self._output_gradients, self._input_leaves = edges, output_gradients, input_leaves
        self._groups: list[_ParameterGroup] = []

    def __bool__(self) -> bool:
        """There is anything left to do."""
        return bool(self._edges or self._groups)

    def backward_inputs(self) -> None:
        """The gradients of the leaves."""
        graph = _StageGraph([edge.node for edge in self._edges], self._input_leaves)
        self._groups = graph.groups()
        entries = {entry for group in self._groups for entry in group.entries}
        hooks = [entry.node.register_prehook(partial(_record_gradients, entry)) for entry in entries]
        on_path = [
            (e, s) for e, s in zip(self._edges, self._output_gradients, strict=True) if graph.reaches_leaf(e.node)
        ]
        try:
            if on_path:
                edges, seeds = [edge for edge, _ in on_path], [seed for _, seed in on_path]
                torch.autograd.backward(edges, seeds, retain_graph=True, inputs=self._input_leaves)
        finally:
            for hook in hooks:
                hook.remove()
        beside = [
            (e, s) for e, s in zip(self._edges, self._output_gradients, strict=True) if not graph.reaches_leaf(e.node)
        ]
        self._edges, self._output_gradients = [edge for edge, _ in beside], [seed for _, seed in beside]
        self._input_leaves = []

    def backward_weights(self, on_start: Callable[[], None] = lambda: None) -> None:
        """The gradients of all parameters; once.

        Args:
            began: called in the backward, before anything else.
        """
        anchor = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            root = _SingleBackward.apply(partial(self._run_groups, on_start), anchor)
        root.backward()
        self._groups, self._edges, self._output_gradients = [], [], []

    def _run_groups(self, on_start: Callable[[], None]) -> None:
        on_start()
        kept = bool(self._edges) or any(len(group.entries) > 1 for group in self._groups)
        for group in self._groups:
            _backward_group(group, retain=kept)
        if self._edges:
            torch.autograd.backward(self._edges, self._output_gradients)


def _record_gradients(entry: _EntryNode, gradients: tuple[torch.Tensor, ...]) -> None:
    entry.gradients = gradients


def _backward_group(group: _ParameterGroup, *, retain: bool) -> None:
    """From the entries of a group to its parameters.

    One entry may lie below another: what comes down from that one was in its noted gradient already. So each node takes
    what was noted, whatever arrives; that also keeps hooks on tensors from changing it a second time.
    """
    roots, seeds, hooks = [], [], []
    for entry in group.entries:
        hooks.append(entry.node.register_prehook(lambda _, noted=entry.gradients: noted))
        for index, gradient in enumerate(entry.gradients):
            if gradient is not None:
                roots.append(GradientEdge(entry.node, index))
                seeds.append(gradient)
    try:
        if roots:
            torch.autograd.backward(roots, seeds, retain_graph=retain, inputs=group.parameters)
    finally:
        for hook in hooks:
            hook.remove()


class _StageGraph:
    """What lies between a stage's outputs, its leaves and its parameters."""

    def __init__(self, roots: list[Node], leaves: list[torch.Tensor]) -> None:
        mine = {id(leaf) for leaf in leaves}
        self._nodes = list(_postorder(roots))
        self._reaches_leaf: dict[Node, bool] = {}
        self._parameters: dict[Node, list[Node]] = {}  # of nodes that reach no leaf: accumulators below
        for node in self._nodes:
            below = [after for after, _ in node.next_functions if after is not None]
            variable = getattr(node, "variable", None)
            self._reaches_leaf[node] = (
                id(variable) in mine if variable is not None else any(map(self.reaches_leaf, below))
            )
            if not self._reaches_leaf[node]:
                found = [node] if variable is not None else [p for after in below for p in self._parameters[after]]
                self._parameters[node] = list(dict.fromkeys(found))

    def reaches_leaf(self, node: Node) -> bool:
        """A leaf is among what lies below."""
        return self._reaches_leaf[node]

    def groups(self) -> list[_ParameterGroup]:
        """Entries and parameters, those together that can't be reached apart."""
        of_parameter: dict[Node, _ParameterGroup] = {}
        for node in self._nodes:
            if not self._reaches_leaf[node]:
                continue
            beside = [after for after, _ in node.next_functions if after is not None and not self._reaches_leaf[after]]
            reached = list(dict.fromkeys(p for after in beside for p in self._parameters[after]))
            if not reached:
                continue
            group = _ParameterGroup([_EntryNode(node)])
            for parameter in reached:
                other = of_parameter.get(parameter)
                if other is None:
                    group.parameters.append(parameter.variable)  # type: ignore[attr-defined]
                elif other is not group:
                    group.entries += other.entries
                    group.parameters += other.parameters
                    for known, held in of_parameter.items():
                        of_parameter[known] = group if held is other else held
                of_parameter[parameter] = group
        return list({id(group): group for group in of_parameter.values()}.values())


def _postorder(roots: list[Node]) -> Iterator[Node]:
    """Every node, after all that lie below it."""
    done: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        if left:
            yield node
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            stack += [(after, False) for after, _ in node.next_functions if after is not None]
