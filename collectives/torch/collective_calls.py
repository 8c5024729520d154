"""torch's collectives on the tensors of one call, in terms of a communicator's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from collectives.arrays.kinds import like, to_array
from collectives.arrays.tensor_memory import TensorMemory, refuse_lazy
from collectives.arrays.tensors import to_torch
from collectives.communicator import Communicator
from collectives.errors import DtypeMismatchError, ShapeMismatchError
from collectives.reductions.reduction import Array
from collectives.torch.reduce_ops import Reduction, name_of, reduction
from collectives.transports.parts import parts_by_rank

Tensors = Sequence[Any]


class CollectiveCalls:
    """Each method returns when the call has ended on this rank; all ranks call the same."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._memory = TensorMemory()

    def _array(self, tensor: Any) -> Any:
        """What the communicator is given: the memory, or a tensor on a GPU as such."""
        if not stays_tensor(tensor):
            return self._memory.array(tensor)
        refuse_lazy(tensor)
        return tensor.detach()

    def _target(self, tensor: Any) -> Any:
        """As `_array`, of a tensor that is written on any rank."""
        strided = tensor.layout == torch.strided and not tensor.is_contiguous()
        if strided and torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has several elements in one place, as"
                " expand() makes them: a tensor that receives a result must have none"
            )
        return self._array(tensor)

    def _reduction(self, tensor: Any, op: Any) -> Reduction:
        """How the tensor is reduced; the ranks compare what the communicator's call doesn't."""
        found = reduction(tensor, op, self.comm.size)
        if found.what is not None:
            self.comm.barrier(found.what)
        return found

    def _flat(self, tensor: Any) -> Any:
        return self._array(tensor).reshape(-1)

    def all_reduce(self, tensors: Tensors, op: Any) -> None:
        """Reduce each tensor in place."""
        kind, plain, call = op.op, self._memory.plain, self.comm.all_reduce
        for tensor in tensors:
            known = name_of(kind, tensor.dtype)
            if known is not None and (view := plain(tensor)) is not None:
                call(view, known, out=view)
                continue
            if tensor.is_sparse:
                self._all_reduce_sparse(tensor, op)
                continue
            found = reduction(tensor, op, self.comm.size)
            array = self._target(found.tensor)
            self.comm.all_reduce(array, found.op, out=array, what=found.what)
            found.store_into(tensor)

    def all_reduce_many(self, tensors: Tensors, op: Any) -> None:
        """Reduce the tensors in place, in few messages."""
        known = [reduction(tensor, op, self.comm.size) for tensor in tensors]
        if len({each.op for each in known}) != 1:
            self.all_reduce(tensors, op)
            return
        arrays = [self._target(each.tensor) for each in known]
        what = ", ".join(each.what for each in known if each.what is not None)
        self.comm.all_reduce_many(arrays, known[0].op, out=arrays, what=what or None)
        for tensor, each in zip(tensors, known, strict=True):
            each.store_into(tensor)

    def _all_reduce_sparse(self, tensor: Any, op: Any) -> None:
        """The sum: all ranks' elements; those of equal indices are added."""
        if op.op != torch.distributed.ReduceOp.SUM:
            self._refuse(f"{op.op}: only the sum of sparse tensors is supported")
        self.comm.barrier(f"all_reduce of sparse tensors of shape {tuple(tensor.shape)}")
        # The mode is the caller's thread's alone, and without it these tensors can't be changed.
        with torch.inference_mode(tensor.is_inference()):
            self._sum_sparse(tensor)

    def _sum_sparse(self, tensor: Any) -> None:
        part = tensor.detach().coalesce()
        # Kept until they are sent, as their arrays do not hold them.
        own_indices, own_values = part.indices().t().contiguous(), part.values().contiguous()
        indices = _tensor(self.comm.all_gather(self._array(own_indices)))
        values = _tensor(self.comm.all_gather(self._array(own_values)))
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    def reduce(self, tensors: Tensors, op: Any, root: int) -> None:
        """Reduce each tensor into the root's."""
        on_root = self.comm.rank == root
        for tensor in tensors:
            found = self._reduction(tensor, op)
            array = self._target(found.tensor)
            self.comm.reduce(array, found.op, root=root, out=array if on_root else None)
            if on_root:
                found.store_into(tensor)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        """Copy the root's tensors into the others'."""
        for tensor in tensors:
            self.comm.broadcast(self._target(tensor), root=root)

    def all_gather(self, outputs: Sequence[Tensors], inputs: Tensors) -> None:
        """Gather inputs[i] of rank r in outputs[i][r]; the ranks' tensors may differ in length."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._check_count("all_gather", parts, "output")
            flat, lengths = self._flat(tensor), [part.numel() for part in parts]
            if len(set(lengths)) == 1:
                # As a row, whose length the ranks compare.
                self._deal(self.comm.all_gather(flat.reshape(1, -1)), parts)
                continue
            # Kept, as its array does not hold it.
            whole = tensor.new_empty(sum(lengths))
            joined = self._array(whole)
            self.comm.all_gather(flat, out=joined)
            sent = self.comm.all_gather(np.array([len(flat)])).tolist()
            if sent != lengths:
                raise ShapeMismatchError(
                    f"all_gather: the ranks sent {sent} elements: this rank's output tensors hold"
                    f" {lengths}"
                )
            self._deal(parts_by_rank(joined, lengths), parts)

    def all_gather_single(self, outputs: Tensors, inputs: Tensors) -> None:
        """Gather the ranks' inputs[i], one after the other, in outputs[i]."""
        for output, tensor in zip(outputs, inputs, strict=True):
            whole = output.detach().contiguous()
            flat, parts, size = self._flat(tensor), self._flat(whole), self.comm.size
            if len(parts) != size * len(flat):
                self._refuse(
                    f"all_gather: the input has {len(flat)} elements and the output {len(parts)}:"
                    f" must be {size} times as many"
                )
            # As rows, whose lengths the ranks compare.
            self.comm.all_gather(flat.reshape(1, -1), out=parts.reshape(size, -1))
            if not output.is_contiguous():
                output.detach().copy_(whole)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], op: Any) -> None:
        """Reduce inputs[i][r] of all ranks into outputs[i] of rank r."""
        for output, parts in zip(outputs, inputs, strict=True):
            self._check_count("reduce_scatter", parts, "input")
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            lengths = [part.numel() for part in parts]
            if len(set(lengths)) == 1:
                self._reduce_scatter(output, flat, op)
            else:
                own = flat.split(lengths)[self.comm.rank]
                alike = own.numel() == output.numel()
                into = "" if alike else f" into {output.numel()}"
                self.comm.barrier(f"reduce_scatter of {lengths} elements{into}")
                if not alike:
                    raise ValueError(
                        f"reduce_scatter: this rank's input has {own.numel()} elements and the"
                        f" output {output.numel()}: must have equally many"
                    )
                self.all_reduce([flat], op)
                output.detach().copy_(own.reshape(output.shape))

    def reduce_scatter_single(self, outputs: Tensors, inputs: Tensors, op: Any) -> None:
        """Reduce inputs[i] of all ranks, and give rank r its r-th part in outputs[i]."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter(output, tensor.detach().reshape(-1), op)

    def _reduce_scatter(self, output: Any, flat: Any, op: Any) -> None:
        if flat.numel() != output.numel() * self.comm.size:
            self._refuse(
                f"reduce_scatter: the input has {flat.numel()} elements and the output"
                f" {output.numel()}: must be {self.comm.size} times as many"
            )
        if flat.dtype != output.dtype:
            self._refuse(f"reduce_scatter: the input is of {flat.dtype}, the output {output.dtype}")
        found = self._reduction(flat, op)
        array = self._array(found.tensor)
        if found.finish is None and output.is_contiguous():
            self.comm.reduce_scatter(array, found.op, out=self._flat(output))
            return
        own = found.result(_tensor(self.comm.reduce_scatter(array, found.op)))
        output.detach().copy_(own.reshape(output.shape))

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, root: int) -> None:
        """Gather inputs[i] of rank r in the root's outputs[i][r]; all have equal lengths."""
        for index, tensor in enumerate(inputs):
            if self.comm.rank == root:
                self._check_count("gather", outputs[index], "output")
            rows = self.comm.gather(self._flat(tensor).reshape(1, -1), root=root)
            if rows is not None:
                self._deal(rows, outputs[index])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], root: int) -> None:
        """Copy inputs[i][r] of the root into outputs[i] of rank r."""
        on_root = self.comm.rank == root
        for index, output in enumerate(outputs):
            # Kept, as its array does not hold it.
            stacked = self._stacked(inputs[index]) if on_root else None
            whole = self._array(stacked) if isinstance(stacked, torch.Tensor) else stacked
            self._receive(output, self.comm.scatter(whole, root=root), root)

    def _stacked(self, parts: Tensors) -> Any:
        """One tensor of the parts for the ranks; or what raises the error on every rank."""
        if len(parts) != self.comm.size:
            return _Refused(
                f"scatter: the list has {len(parts)} tensors: must have {self.comm.size}, one for"
                " each rank of the group"
            )
        if len({(part.shape, part.dtype, part.device) for part in parts}) > 1:
            return _Refused("scatter: the tensors of the list differ in shape, dtype or device")
        return torch.stack([part.detach() for part in parts])

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> None:
        """Send inputs[r] to rank r, and receive outputs[r] from it."""
        self._check_count("all_to_all", outputs, "output")
        self._check_count("all_to_all", inputs, "input")
        received = self.comm.all_to_all([self._flat(tensor) for tensor in inputs])
        self._deal(received, outputs)

    def all_to_all_single(self, output: Any, tensor: Any) -> None:
        """As `all_to_all`, of the equal parts of a contiguous tensor into another one."""
        self.comm.all_to_all(self._flat(tensor), out=self._flat(output))

    def _refuse(self, problem: str) -> NoReturn:
        """Raise ValueError before a call: a MismatchError where other ranks make it."""
        self.comm.barrier(problem)
        raise ValueError(problem)

    def _check_count(self, call: str, tensors: Tensors, kind: str) -> None:
        if len(tensors) != self.comm.size:
            self._refuse(
                f"{call}: the list has {len(tensors)} {kind} tensors: must have {self.comm.size},"
                " one for each rank of the group"
            )

    def _deal(self, blocks: Sequence[Array], outputs: Tensors) -> None:
        """Copy each rank's block into its tensor."""
        for peer, (output, block) in enumerate(zip(outputs, blocks, strict=True)):
            self._receive(output, block, peer)

    def _receive(self, output: Any, block: Any, peer: int) -> None:
        if (count := math.prod(block.shape)) != output.numel():
            raise ShapeMismatchError(
                f"rank {peer} sent {count} elements: the output tensor holds {output.numel()}"
            )
        target = self._target(output)
        if stays_tensor(output) and not isinstance(block, torch.Tensor):
            block = like(output)(block)
        if block.dtype != target.dtype:
            raise DtypeMismatchError(
                f"rank {peer} sent {block.dtype}: the output tensor holds {output.dtype}"
            )
        target[...] = block.reshape(target.shape)
        if stays_tensor(output):
            # CuPy reuses the block's memory in the order of its own stream, which follows torch's
            # from this conversion on.
            to_array(output.detach())


class _Refused:
    """A wrong argument of the root: its conversion to an array fails, which all ranks raise."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise ValueError(self._problem)


def stays_tensor(tensor: Any) -> bool:
    """Whether the communicator is given the tensor itself: it finds the path of a GPU's memory."""
    return bool(tensor.is_cuda)


def _tensor(array: Any) -> Any:
    """A result as a tensor that shares its memory."""
    return array if isinstance(array, torch.Tensor) else to_torch(array)
