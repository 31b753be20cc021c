"""The sharded repair: each rank keeps the state of its own segments, and of the blocks it shares.

A step, on one rank:

1. Cut blocks lack a few gradient elements. One `all_to_all_single` brings them (`edges`).
2. Uncut blocks lie in the shard as they lie in the original parameters. Native kernels update
   them in place: views, no copies, a run of neighbouring parameters a call (`layout.plan_shard`).
3. Cut blocks, at most two a unit, are made whole side by side in a scratch buffer and
   updated there. Every rank that shares a block computes the same state from the same inputs and
   keeps it, and writes back only the parameter elements that it holds.

That is all, because state depends on gradients alone, and each parameter element's update on
no other element: no parameter values travel, no state travels, and no block has an owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from . import stock
from .base import GRADIENT, NO_GRADIENT, OriginalParamAdamW8bit, raise_others, raise_own
from .edges import Edge, EdgeExchange, copy_all, flat, flat_gradient
from .layout import BLOCK_SIZE, Piece, Run, ShardPlan, StateSegment, merge_runs, num_blocks, plan_shard
from .named_state import NamedParam, State, States, copy_state, cut_state, transport_device
from .update import Hyperparameters, new_state, update_run

Update = tuple[Hyperparameters, int]
"""What a kernel call needs besides tensors: hyperparameters, and the step counted from 1."""


class ShardedAdamW8bit(OriginalParamAdamW8bit):
    """AdamW8bit whose state follows the original parameters and is sharded with them.

    Constructor, `step` and errors: see `OriginalParamAdamW8bit`.

    `state[tensor]` is this rank's state, in shard order (see `update.new_state`), and
    `steps`: how often each original parameter of the tensor has been updated.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._plans: dict[Tensor, ShardPlan] = {}
        self._planned_for: list[int] | None = None
        self._exchanges: list[EdgeExchange] = []
        self._cut_blocks: list[_CutBlocks] = []
        super().__init__(*args, **kwargs)

    def _update(self) -> None:
        outgoing = self.outgoing_edges()
        self.step_with_edges(
            [exchange.exchange(buffer) for exchange, buffer in zip(self._exchanges, outgoing, strict=True)]
        )

    @torch.no_grad()
    def outgoing_edges(self) -> list[Tensor]:
        """The edge gradients that this rank owes to others: a buffer for each process group."""
        self._plan()
        problems = self._problems()
        statuses = {tensor: self._status(tensor, problems) for tensor in self._settings}
        gradients = {
            tensor: flat_gradient(tensor) for tensor, status in statuses.items() if status == GRADIENT
        }
        return [exchange.pack(gradients, statuses) for exchange in self._exchanges]

    @torch.no_grad()
    def step_with_edges(self, incoming: Sequence[Tensor]) -> None:
        """The rest of `step`, given what the other ranks owe to this one. Communicates nothing.

        `step` is `outgoing_edges`, an exchange, and this; apart they let one process play any
        number of ranks.
        """
        self._refuse(incoming)
        updates: dict[Tensor, list[Update]] = {}
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None and self._takes_part(tensor):
                    updates[tensor] = self._count_step(group, tensor)
        for tensor, each in updates.items():
            param, grad = flat(tensor), flat_gradient(tensor)
            for run in self._plans[tensor].runs:
                update_run(run, param, grad, self.state[tensor], *each[run.index])
        received: dict[Edge, list[tuple[Piece, Tensor]]] = {}
        for exchange, buffer in zip(self._exchanges, incoming, strict=True):
            for edge, piece, gradient in exchange.unpack(buffer):
                received.setdefault(edge, []).append((piece, gradient))
        for cut_blocks in self._cut_blocks:
            cut_blocks.update(self.state, received, updates)

    def edge_sizes(self) -> list[list[int]]:
        """How many elements of `incoming` come from each rank, for each process group."""
        self._plan()
        return [exchange.receive_sizes for exchange in self._exchanges]

    def _plan(self) -> None:
        """Plan runs, cut blocks and exchanges: once, and again when parameters are frozen or thawed."""
        taking_part = [tensor for tensor in self._settings if self._takes_part(tensor)]
        planned_for = [len(self._settings), *map(id, taking_part)]
        if self._planned_for == planned_for:
            return
        self._planned_for = planned_for
        self._plans = {tensor: self._plan_tensor(tensor) for tensor in self._settings}
        self._exchanges = self._plan_exchanges(taking_part)
        scratches: dict[Any, list[Edge]] = {}
        for exchange in self._exchanges:
            for edge in exchange.edges:
                key = (edge.tensor.dtype, edge.tensor.device)
                scratches.setdefault(key, []).append(edge)
        self._cut_blocks = [_CutBlocks(edges) for edges in scratches.values()]

    def _plan_tensor(self, tensor: Tensor) -> ShardPlan:
        settings = self._settings[tensor]
        share = [
            (param.overrides, step)
            for param, step in zip(settings.params, self.state[tensor]["steps"], strict=True)
        ]
        return plan_shard(settings.layout, settings.is_8bit, share)

    def _plan_exchanges(self, tensors: Sequence[Tensor]) -> list[EdgeExchange]:
        """One exchange for each process group in which any rank's bound cuts a block of `tensors`."""
        groups: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            layout = self._settings[tensor].layout
            if layout.num_ranks > 1:
                groups.setdefault(layout.process_group, []).append(tensor)
        return [
            EdgeExchange(
                [Edge(tensor, cut) for tensor in members for cut in self._plans[tensor].cuts],
                self._settings[members[0]].layout,
                reduce(torch.promote_types, [tensor.dtype for tensor in members]),
                transport_device(members[0], group),
            )
            for group, members in groups.items()
            if any(self._settings[tensor].is_cut for tensor in members)
        ]

    def _refuse(self, incoming: Sequence[Tensor]) -> None:
        """Raise, before anything is changed, if this rank or one that it shares a block with must."""
        problems = self._problems()
        raise_own(problems)
        statuses: dict[Tensor, dict[int, int]] = {}
        for exchange, buffer in zip(self._exchanges, incoming, strict=True):
            for edge, rank, status in exchange.statuses(buffer):
                own = {edge.cut.own.rank: self._status(edge.tensor, problems)}
                statuses.setdefault(edge.tensor, own)[rank] = status
        for tensor, by_rank in statuses.items():
            raise_others(self._name(tensor), by_rank)

    def _count_step(self, group: Mapping[str, Any], tensor: Tensor) -> list[Update]:
        """Begin the next update of `tensor`, its first if it has no state yet."""
        state = self.state[tensor]
        hypers = self._hyperparameters(group, tensor)
        if "codes1" not in state:
            state.update(new_state(self._plans[tensor], tensor.device))
        state["steps"] = [step + 1 for step in state["steps"]]
        return list(zip(hypers, state["steps"], strict=True))

    def needed_range(self, param: NamedParam) -> tuple[int, int]:
        """The elements of `param` whose state this rank keeps: of the blocks it touches, or its own."""
        segment = self._state_segment(param)
        return (segment.param_start, segment.param_end) if segment is not None else (0, 0)

    def read_state(self, param: NamedParam, start: int, end: int) -> State:
        """The state of elements `start..end` of `param`, in whole blocks: views."""
        segment = self._state_segment(param)
        assert segment is not None
        kept = self._kept_state(self.state[param.tensor], segment)
        return cut_state(kept, start - segment.param_start, end - segment.param_start)

    def write_states(self, states: States) -> None:
        """Replace all state by the step, and the state of `needed_range`, of each parameter."""
        written: dict[Tensor, dict[str, Any]] = {}
        for param in self.named_params():
            step, values = states.get(param.key, (0, {}))
            tensor = param.tensor
            entry = written.setdefault(tensor, {"steps": [0] * len(param.layout.params)})
            entry["steps"][param.index] = step
            segment = self._state_segment(param)
            if step > 0 and "codes1" not in entry:
                entry.update(new_state(self._plans[tensor], tensor.device))
            if step > 0 and segment is not None:
                copy_state(self._kept_state(entry, segment), values)
        self.state.update(written)
        self._planned_for = None  # parameters with equal steps share runs

    def _write_packed(self, packed: dict[Tensor, stock.Packed]) -> None:
        states: States = {}
        for tensor, params in self.params_by_tensor().items():
            if tensor in packed:
                states.update(stock.unpack(params, packed[tensor]))
        self.write_states(states)
        self._plan()
        statuses = {tensor: GRADIENT if tensor in packed else NO_GRADIENT for tensor in self._settings}
        for exchange in self._plan_exchanges(list(self._settings)):
            for number in (1, 2):  # the codes of cut blocks that other ranks hold, as once gradients
                codes = {tensor: flat(each[f"state{number}"]) for tensor, each in packed.items()}
                incoming = exchange.exchange(exchange.pack(codes, statuses))
                for edge, piece, values in exchange.unpack(incoming):
                    kept = self.state[edge.tensor].get(f"codes{number}")
                    if kept is not None:
                        start = edge.cut.state_start + piece.param_start - edge.cut.block.param_start
                        kept[start : start + piece.numel] = values

    def _state_segment(self, param: NamedParam) -> StateSegment | None:
        self._plan()
        segments = self._plans[param.tensor].state
        return next((each for each in segments if each.index == param.index), None)

    def _kept_state(self, entry: Mapping[str, Tensor], segment: StateSegment) -> State:
        """Views of all that `entry` keeps of one segment."""
        numel = segment.param_end - segment.param_start
        elements = slice(segment.state_start, segment.state_start + numel)
        if not segment.is_8bit:
            return {"state1": entry["moments1"][elements], "state2": entry["moments2"][elements]}
        blocks = slice(segment.block_start, segment.block_start + num_blocks(numel))
        return {
            "state1": entry["codes1"][elements],
            "state2": entry["codes2"][elements],
            "absmax1": entry["absmax1"][blocks],
            "absmax2": entry["absmax2"][blocks],
        }


class _CutBlocks:
    """All cut blocks of one dtype on one device, whole, side by side in a scratch buffer.

    Side by side they are like one parameter: neighbours that agree in hyperparameters and step
    are updated by one call. Short blocks come last, since a call can only end with one.
    """

    def __init__(self, edges: Sequence[Edge]) -> None:
        self.edges = sorted(edges, key=lambda edge: edge.cut.block.numel < BLOCK_SIZE)
        self.runs: list[Run] = []
        start = 0
        for index, edge in enumerate(self.edges):
            end = start + edge.cut.block.numel
            self.runs.append(Run(index, True, start, end, start, index))
            start = end
        first = edges[0].tensor
        plan = ShardPlan((), (), (), codes=start, blocks=len(self.edges), floats=0)
        self.state = new_state(plan, first.device)
        self.param = torch.zeros(start, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros_like(self.param)

    def update(
        self,
        states: Mapping[Tensor, Mapping[str, Any]],
        received: Mapping[Edge, Sequence[tuple[Piece, Tensor]]],
        updates: Mapping[Tensor, list[Update]],
    ) -> None:
        """Update the cut blocks of every tensor in `updates`, and write back what this rank holds."""
        runs = [run for run in self.runs if self.edges[run.index].tensor in updates]
        kept = [pair for run in runs for pair in self._kept(run, states)]
        lent = [pair for run in runs for pair in self._gradients(run, received)]
        copy_all(kept + lent)
        share = [
            updates[edge.tensor][edge.cut.block.index] if edge.tensor in updates else None
            for edge in self.edges
        ]
        for run in merge_runs(runs, share):
            update = share[run.index]
            assert update is not None
            update_run(run, self.param, self.grad, self.state, *update)
        copy_all([(outside, inside) for inside, outside in kept])

    def _kept(self, run: Run, states: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[tuple[Tensor, Tensor]]:
        """What goes into the scratch buffer and back, as (inside, outside): own parameter piece, state."""
        edge = self.edges[run.index]
        cut, state = edge.cut, states[edge.tensor]
        yield (
            self._piece(self.param, run, cut.own),
            flat(edge.tensor)[cut.shard_start : cut.shard_start + cut.own.numel],
        )
        for name in ("codes1", "codes2"):
            outside = state[name][cut.state_start : cut.state_start + run.numel]
            yield self.state[name][run.start : run.end], outside
        for name in ("absmax1", "absmax2"):
            outside = state[name][cut.block_start : cut.block_start + 1]
            yield self.state[name][run.block_start : run.block_start + 1], outside

    def _gradients(
        self, run: Run, received: Mapping[Edge, Sequence[tuple[Piece, Tensor]]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces of the block's gradient, as (inside, outside): own and received."""
        edge = self.edges[run.index]
        cut = edge.cut
        yield (
            self._piece(self.grad, run, cut.own),
            flat_gradient(edge.tensor)[cut.shard_start : cut.shard_start + cut.own.numel],
        )
        for piece, gradient in received[edge]:
            yield self._piece(self.grad, run, piece), gradient

    def _piece(self, buffer: Tensor, run: Run, piece: Piece) -> Tensor:
        start = run.start + piece.param_start - self.edges[run.index].cut.block.param_start
        return buffer[start : start + piece.numel]
