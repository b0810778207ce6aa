"""Collectives whose inputs check themselves: what a rank must get follows from the ranks' numbers.

Each case is for a world of any layout. `put` makes this rank's tensor of one on the host, wherever
its own shall be.
"""

import zlib

import torch
import torch.distributed as dist

from kaitian_mpi.mpi.exchange import gather_values

# Names that torch has had since 2.13, for the tests on earlier releases.
for _name, _earlier in (
    ("all_gather_single", "all_gather_into_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
):
    if not hasattr(dist, _name):
        setattr(dist, _name, getattr(dist, _earlier))


def factor(world):
    """Return the sum of the ranks' numbers, from 1 on."""
    return world.size * (world.size + 1) // 2


def values(tensor):
    """Return a tensor's values on the host."""
    return tensor.detach().cpu()


def agree(world, tensor):
    """Return whether a tensor is the same, bit by bit, on all ranks."""
    content = values(tensor).contiguous().view(-1).view(torch.uint8)
    return len(set(gather_values(world.comm, zlib.crc32(content.numpy())))) == 1


def check(tensors, expected):
    for number, (tensor, content) in enumerate(zip(tensors, expected, strict=True)):
        assert torch.equal(values(tensor), content), (number, content.dtype, content.shape)


def check_sum(world, put, dtype, length, *, in_background=False):
    content = torch.arange(length) % 7
    tensor = put((content * (world.rank + 1)).to(dtype))
    work = dist.all_reduce(tensor, async_op=in_background)
    if work is not None:
        work.wait()
    check([tensor], [(content * factor(world)).to(dtype)])


def check_views_and_lists(world, put):
    for in_background in (False, True):
        whole = put(torch.full((12,), 100.0))
        view = whole[::2]
        view.copy_(put(torch.full((6,), world.rank + 1.0)))
        work = dist.all_reduce(view, async_op=in_background)
        if work is not None:
            work.wait()
        assert values(whole).tolist() == [float(factor(world)), 100.0] * 6
    several = [put(torch.full(shape, world.rank + 1.0)) for shape in ((), (3,), (2, 2))]
    dist.group.WORLD.allreduce_coalesced(several).wait()
    check(several, [torch.full(tensor.shape, float(factor(world))) for tensor in several])
    for shape in ((), (0, 3)):
        tensor = put(torch.ones(shape))
        pieces = [put(torch.zeros(shape)) for _ in range(world.size)]
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather(pieces, tensor)
        check(pieces, [torch.full(shape, float(world.size))] * world.size)


def check_reduction_operations(world, put, dtype):
    content = torch.stack([(torch.arange(9) + rank) % 3 for rank in range(world.size)]).to(dtype)
    wide = content.double()
    for op, result in (("MIN", wide.amin(0)), ("MAX", wide.amax(0)), ("PRODUCT", wide.prod(0))):
        tensor = put(content[world.rank].clone())
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        check([tensor], [result.to(dtype)])


def check_average(world, put, dtype):
    generator = torch.Generator().manual_seed(1)
    content = torch.randn(world.size, 50_001, generator=generator).to(dtype)
    for length in (5, 50_001):
        tensor = put(content[world.rank, :length].clone())
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert agree(world, tensor)
        near = content[:, :length].double().mean(0)
        error = (values(tensor).double() - near).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps


def check_moves(world, put, dtype, length, roots):
    ranks, rank = range(world.size), world.rank

    def content(number, length=length):
        return ((torch.arange(max(0, length)) + number) % 2).to(dtype)

    def empty(length=length):
        return put(content(0, length))

    def cat(parts):
        return torch.cat(list(parts))

    for root in roots:
        tensor = put(content(rank))
        dist.broadcast(tensor, root)
        check([tensor], [content(root)])
        pieces = [empty() for _ in ranks] if rank == root else None
        dist.gather(put(content(rank)), pieces, dst=root)
        if pieces:
            check(pieces, map(content, ranks))
        got, inputs = empty(), [put(content(each + 1)) for each in ranks]
        dist.scatter(got, inputs if rank == root else None, src=root)
        check([got], [content(rank + 1)])
    pieces = [empty(length - other) for other in ranks]
    dist.all_gather(pieces, put(content(rank, length - rank)))
    check(pieces, [content(other, length - other) for other in ranks])
    whole = put(cat(content(0) for _ in ranks))
    dist.all_gather_single(whole, put(content(rank)))
    check([whole], [cat(map(content, ranks))])
    received = [empty(length - rank) for _ in ranks]
    dist.all_to_all(received, [put(content(rank + to, length - to)) for to in ranks])
    check(received, [content(source + rank, length - rank) for source in ranks])
    dist.all_to_all_single(whole, put(cat(content(rank + to) for to in ranks)))
    check([whole], [cat(content(source + rank) for source in ranks)])


def check_reductions(world, put, dtype, length):
    content = torch.arange(length) % 3
    rank_content = (content * (world.rank + 1)).to(dtype)
    summed = (content * factor(world)).to(dtype)
    for root in range(world.size):
        tensor = put(rank_content.clone())
        dist.reduce(tensor, root)
        if world.rank == root:
            check([tensor], [summed])
    output = put(torch.zeros(length, dtype=dtype))
    dist.reduce_scatter_single(output, put(torch.cat([rank_content] * world.size)))
    check([output], [summed])
    shorter = [rank_content[: max(0, length - other)].clone() for other in range(world.size)]
    output = put(torch.zeros_like(shorter[world.rank]))
    dist.reduce_scatter(output, [put(piece) for piece in shorter])
    check([output], [summed[: max(0, length - world.rank)]])


def check_uneven_parts(world, put):
    given = [rank + 1 for rank in range(world.size)]
    taken = [world.rank + 1] * world.size
    output = put(torch.zeros(sum(taken), 3))
    tensor = put(torch.full((sum(given), 3), float(world.rank)))
    dist.all_to_all_single(output, tensor, taken, given)
    expected = torch.arange(world.size).repeat_interleave(world.rank + 1).float()
    check([output], [expected[:, None].expand(-1, 3)])
