"""Backward in two parts: the gradients of a stage's inputs first, those of its parameters later.

[Note: split backward] The first part runs the autograd nodes that lead to an input of the stage. Where one of these
nodes also has an edge towards parameters, the first part records the gradient at that node. The second part enters the
graph at these nodes again and runs only towards the parameters; for a matrix product this is the other half of its
backward. (Qi et al. 2024, Zero Bubble Pipeline Parallelism.) `torch.distributed.pipelining` has a private
implementation that sets `.grad` by hand, so gradient hooks do not run. Here hooks run as in any backward.

The graph and its saved tensors stay in memory between the parts. Checkpointed layers are recomputed in both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from windlass.base.errors import ModelError


@dataclass(eq=False)
class _EntryNode:
    """Autograd node at which the second part enters the graph, and the gradients that the first part recorded there."""

    node: Node
    gradients: tuple[torch.Tensor | None, ...] = ()


@dataclass(eq=False)
class _ParameterGroup:
    """Entry nodes, and the parameters below them. No two groups share a parameter."""

    entries: list[_EntryNode] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


class _SingleBackward(torch.autograd.Function):
    """Outer backward around several inner ones, so that end-of-backward callbacks run once."""

    @staticmethod
    def forward(ctx: Any, run: Any, anchor: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


class SplitBackward:
    """Backward of one stage for one micro-batch in two parts: `backward_inputs`, then `backward_weights`.

    Args:
        edges: outputs of the stage, where gradients enter its graph.
        output_gradients: gradients of these outputs.
        input_leaves: inputs of the stage that need gradients; `backward_inputs` sets their `.grad`. Without such inputs
            the second part does all work.
    """

    def __init__(
        self, edges: list[GradientEdge], output_gradients: list[torch.Tensor], input_leaves: list[torch.Tensor]
    ) -> None:
        self._edges, self._output_gradients, self._input_leaves = edges, output_gradients, input_leaves
        self._groups: list[_ParameterGroup] = []

    def __bool__(self) -> bool:
        """Return True if any work is left."""
        return bool(self._edges or self._groups)

    def backward_inputs(self) -> None:
        """Compute the gradients of the stage's inputs.

        Raises:
            ModelError: a part of the stage uses reentrant activation checkpointing.
        """
        graph = _StageGraph([edge.node for edge in self._edges], self._input_leaves)
        self._groups = graph.groups()
        entries = {entry for group in self._groups for entry in group.entries}
        hooks = [entry.node.register_prehook(partial(_record_gradients, entry)) for entry in entries]
        # Keep only edges that lead to an input leaf: the others lead only to parameters and run in the second part.
        on_path = [
            (e, s) for e, s in zip(self._edges, self._output_gradients, strict=True) if graph.reaches_leaf(e.node)
        ]
        try:
            if on_path:
                edges, seeds = [edge for edge, _ in on_path], [seed for _, seed in on_path]
                # retain_graph: the second part runs through the same graph.
                torch.autograd.backward(edges, seeds, retain_graph=True, inputs=self._input_leaves)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise ModelError(
                'pipeline.schedule is "zero-bubble", whose backward computes gradients of inputs before those of '
                "parameters, and reentrant activation checkpointing computes both at once; pass use_reentrant=False to "
                'torch.utils.checkpoint, or write "1f1b"'
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        side_edges = [
            (e, s) for e, s in zip(self._edges, self._output_gradients, strict=True) if not graph.reaches_leaf(e.node)
        ]
        self._edges, self._output_gradients = [edge for edge, _ in side_edges], [seed for _, seed in side_edges]
        self._input_leaves = []

    def backward_weights(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Compute the gradients of all parameters. May be called once.

        Args:
            on_start: called inside the backward, before any computation.
        """
        anchor = torch.zeros((), requires_grad=True)
        # Grad mode may be off here, and without it `root.backward()` could not run the groups.
        with torch.enable_grad():
            root = _SingleBackward.apply(partial(self._run_groups, on_start), anchor)
        root.backward()
        self._groups, self._edges, self._output_gradients = [], [], []

    def _run_groups(self, on_start: Callable[[], None]) -> None:
        on_start()
        # Several entries may share nodes below them, so buffers stay until the last group has run.
        kept = bool(self._edges) or any(len(group.entries) > 1 for group in self._groups)
        for group in self._groups:
            _backward_group(group, retain=kept)
        if self._edges:
            torch.autograd.backward(self._edges, self._output_gradients)


def _record_gradients(entry: _EntryNode, gradients: tuple[torch.Tensor, ...]) -> None:
    entry.gradients = gradients


def _backward_group(group: _ParameterGroup, *, retain: bool) -> None:
    """Run the backward from the entry nodes of a group to its parameters.

    One entry node may be below another, and its recorded gradient already includes the contribution from above. So
    each entry node uses its recorded gradient and ignores the gradient that arrives. This also keeps tensor hooks from
    changing the gradient a second time.
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
    """Graph between a stage's outputs, its input leaves and its parameters."""

    def __init__(self, roots: list[Node], leaves: list[torch.Tensor]) -> None:
        local = {id(leaf) for leaf in leaves}
        self._nodes = list(_postorder(roots))
        self._reaches_leaf: dict[Node, bool] = {}
        # AccumulateGrad nodes of parameters below each node that leads to no input leaf
        self._parameters: dict[Node, list[Node]] = {}
        for node in self._nodes:
            below = [after for after, _ in node.next_functions if after is not None]
            variable = getattr(node, "variable", None)
            self._reaches_leaf[node] = (
                id(variable) in local if variable is not None else any(map(self.reaches_leaf, below))
            )
            if not self._reaches_leaf[node]:
                found = [node] if variable is not None else [p for after in below for p in self._parameters[after]]
                self._parameters[node] = list(dict.fromkeys(found))

    def reaches_leaf(self, node: Node) -> bool:
        """Return True if the node leads to an input leaf."""
        return self._reaches_leaf[node]

    def groups(self) -> list[_ParameterGroup]:
        """Return groups of entry nodes and parameters. Parameters that share an entry node are in one group."""
        of_parameter: dict[Node, _ParameterGroup] = {}
        for node in self._nodes:
            if not self._reaches_leaf[node]:
                continue
            side_edges = [
                after for after, _ in node.next_functions if after is not None and not self._reaches_leaf[after]
            ]
            reached = list(dict.fromkeys(p for after in side_edges for p in self._parameters[after]))
            if not reached:
                continue
            group = _ParameterGroup([_EntryNode(node)])
            for parameter in reached:
                other = of_parameter.get(parameter)
                if other is None:
                    group.parameters.append(parameter.variable)  # type: ignore[attr-defined]
                elif other is not group:
                    # An earlier entry also leads to this parameter: one backward must run from both.
                    group.entries += other.entries
                    group.parameters += other.parameters
                    for known, held in of_parameter.items():
                        of_parameter[known] = group if held is other else held
                of_parameter[parameter] = group
        return list({id(group): group for group in of_parameter.values()}.values())


def _postorder(roots: list[Node]) -> Iterator[Node]:
    """Yield every node after all nodes below it."""
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
