"""An emulated fabric: one process is one rank of a world of any size, and its collectives take the time they would.

Importing this makes `emulated` a backend of torch.distributed, for any code that uses process groups: DDP, FSDP,
DTensor, device meshes, functional collectives, compiled or not. Nobody else exists. A `Machine` says how long each
collective takes; it travels beside computation, and waiting for it waits for the rest of that time.

    from crossfade import emulated

    with emulated.world(machine, ranks=64):
        model = DistributedDataParallel(model)
        ...

**Time.** A collective arrives `machine.collective_seconds(...)` after it is launched and has the link to itself;
launching takes the fabric's `launch`, if Python does not take longer. The axis is the group's description (`mesh_dp`
of a DeviceMesh is axis `dp`), `"*"` for groups without one. Collectives of one axis travel one after another, whatever
group they are of; axes travel side by side, unless `one_link`. What the five kinds of `Machine` do not name is charged
as the nearest of them: a reduction to one rank as a broadcast; gathering to and scattering from one as an all-gather,
and a message to one as its part of an all-gather; a barrier as an all-reduce of nothing. An exchange counts what goes
to others. Messages received come with those that this rank sends: see `messages`. That a collective slows
computation down (`slows_compute`) is not emulated, beyond what writing its values takes; steps compiled for emulated
groups are planned and predicted without it.

**Values.** Every other rank holds what this one holds: see `values`. What only another rank could know cannot
come: an object that it broadcasts is not received, what it scatters is zero, and so is what comes in an exchange in
which this rank has nothing for itself. Outputs are written between launch and
arrival, so that whoever reads before waiting reads nonsense sometimes, as in life. On CPU a thread writes them, which
takes memory bandwidth and up to one core from the computation: a gather over 64 ranks writes 64 times its input. Where
the writing takes longer than the travel, the collective arrives late: `Emulation.late` adds up by how much. Outputs of
up to 64 KiB are written at launch. With `values=False` larger ones are left as they were, and cost nothing; programs
steer by small ones (shapes, counts).

**Devices.** On CPU tensors `wait` sleeps. On CUDA tensors a stream of the link's own is kept busy and `wait` makes the
current stream wait, as NCCL does; the thread goes on. The first collective on a device takes a moment to measure its
clock.
"""

from crossfade.emulated.process_group import Emulation, use, world

__all__ = ["Emulation", "use", "world"]
