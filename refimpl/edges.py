"""Edge gradients: what a cut block lacks on one rank and another rank holds.

All cut blocks of all tensors that share a process group travel in ONE `all_to_all_single`. Its sizes
follow from the layouts, so every rank knows them without asking, and enters it whether or not it
has gradients (rule `collective.unconditional`). A piece of a block goes to every other rank that
touches the block, as

    status, gradient element, gradient element, ...

The status says whether the sender has a gradient or refuses the step, so that the ranks which
share a block either fail together or update it from the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .base import explaining_failure
from .layout import CutRun, Piece, ShardLayout


@dataclass(frozen=True, eq=False)
class Edge:
    """A cut block that this rank touches, of a tensor that the optimizer sees."""

    tensor: Tensor
    cut: CutRun


@dataclass(frozen=True, eq=False)
class Received:
    """A piece of `edge` that another rank holds, and where it begins in the incoming buffer."""

    edge: Edge
    piece: Piece
    start: int


class EdgeExchange:
    """The edges of one process group: what to send to whom, and what comes back.

    Args:
        edges: this rank's, in the order of the optimizer's tensors, which is the same on every rank.
        layout: of any tensor of the group: rank, number of ranks and process group are read from it.
        dtype: one that holds the gradients of all tensors of the group exactly; the same on every rank.
        device: from where the group can send (`named_state.transport_device`).
    """

    def __init__(
        self, edges: Sequence[Edge], layout: ShardLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.group = layout.process_group
        self.edges = edges
        self.sent: list[tuple[int, Edge]] = []
        self.received: list[Received] = []
        self.send_sizes: list[int] = []
        self.receive_sizes: list[int] = []
        for peer in range(layout.num_ranks):
            sent, received = sum(self.send_sizes), sum(self.receive_sizes)
            self.send_sizes.append(0)
            self.receive_sizes.append(0)
            for edge in edges if peer != layout.rank else ():
                for piece in edge.cut.block.pieces:
                    if piece.rank == peer:
                        self.sent.append((sent + self.send_sizes[-1], edge))
                        self.received.append(Received(edge, piece, received + self.receive_sizes[-1]))
                        self.send_sizes[-1] += 1 + edge.cut.own.numel
                        self.receive_sizes[-1] += 1 + piece.numel
        self._outgoing = torch.zeros(sum(self.send_sizes), dtype=dtype, device=device)
        self._sent_at = torch.tensor([start for start, _ in self.sent], dtype=torch.long, device=device)
        self._received_at = torch.tensor(
            [each.start for each in self.received], dtype=torch.long, device=device
        )

    def pack(self, gradients: Mapping[Tensor, Tensor], statuses: Mapping[Tensor, int]) -> Tensor:
        """The outgoing buffer, from flat gradients by tensor. What has none sends its status alone."""
        buffer = self._outgoing
        pairs = []
        for start, edge in self.sent:
            if edge.tensor in gradients:
                cut, grad = edge.cut, gradients[edge.tensor]
                target = buffer[start + 1 : start + 1 + cut.own.numel]
                pairs.append((target, grad[cut.shard_start : cut.shard_start + cut.own.numel]))
        copy_all(pairs)
        values = [statuses[edge.tensor] for _, edge in self.sent]
        buffer[self._sent_at] = torch.tensor(values, dtype=buffer.dtype, device=buffer.device)
        return buffer

    def exchange(self, outgoing: Tensor) -> Tensor:
        """Send `outgoing`; returns the incoming buffer. Collective over the process group."""
        if self.group is None:
            raise RuntimeError(
                "the layouts have several ranks but no process group, so step() cannot exchange edge"
                " gradients: use outgoing_edges() and step_with_edges()"
            )
        incoming = torch.empty(sum(self.receive_sizes), dtype=outgoing.dtype, device=outgoing.device)
        with explaining_failure("the exchange of edge gradients"):
            dist.all_to_all_single(incoming, outgoing, self.receive_sizes, self.send_sizes, group=self.group)
        return incoming

    def unpack(self, incoming: Tensor) -> Iterator[tuple[Edge, Piece, Tensor]]:
        """What came: for each piece of an edge that another rank holds, its gradient elements."""
        for each in self.received:
            start = each.start + 1
            yield each.edge, each.piece, incoming[start : start + each.piece.numel]

    def statuses(self, incoming: Tensor) -> list[tuple[Edge, int, int]]:
        """What the other ranks say, as (edge, rank, status). Synchronizes the device, once a step."""
        values = incoming[self._received_at].tolist()
        return [
            (each.edge, each.piece.rank, int(status))
            for each, status in zip(self.received, values, strict=True)
        ]


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, in few kernel launches: one batch a pair of dtypes."""
    batches: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = batches.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in batches.values():
        torch._foreach_copy_(targets, sources)


def flat(tensor: Tensor) -> Tensor:
    """All elements in row-major order: a view, as tensors in a layout are contiguous."""
    return tensor.detach().view(-1)


def flat_gradient(tensor: Tensor) -> Tensor:
    """All elements of the gradient in row-major order: a view, unless it is not contiguous."""
    assert tensor.grad is not None
    return tensor.grad.detach().reshape(-1)
