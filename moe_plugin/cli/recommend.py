"""`moe-plugin recommend`, which measures the ranks on which it runs and plans how to train a model
on them.

The command prints the command that launches training in the host, and the predicted step time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from moe_plugin.cli.plan import check_counts, host_options, write_plan
from moe_plugin.cli.planning.launch import CONFIG, LINE, LaunchCommand
from moe_plugin.utils.messages import short
from moe_plugin.utils.quiet import quiet
from moe_plugin.utils.regular_files import output_folder, write_regular

if TYPE_CHECKING:
    import torch

    from moe_plugin.comm import Comm
    from moe_plugin.planner.cluster import Cluster, Device
    from moe_plugin.planner.model import MeasuredNetwork, ModelShape, Processor, Record
    from moe_plugin.planner.plan_cost import PlanCost

NETWORK, PROCESSOR = "network.json", "processor.json"
FILES = (NETWORK, PROCESSOR, CONFIG, LINE)
LEFT_OUT = (
    ", without the optimizer, the host's work outside of the layers, data loading, logging, "
    "evaluation and checkpoints; not searched: pipeline schedules (--pipeline-schedule auto "
    "measures them) and swapped activations")
KEPT = 64  # number of plans to check for a fit with recomputed layers


def recommend_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin recommend`."""
    p.description = (
        "Measures the network and the processors of the ranks it runs on (start it with torchrun, "
        "like the training), plans the model for them, and prints the launch line of the host with "
        "the predicted step time and the errors of the fits. The measurements are stored in --out.")
    p.add_argument("--model", type=Path, required=True, metavar="FILE",
                   help="model file (see configs/plans/)")
    host_options(p, "DATA", 4)
    p.add_argument("--out", type=Path, default=Path("runs/recommend"), metavar="DIR",
                   help="folder for the measurements, moe.yaml and launch.sh "
                        "(default: %(default)s)")
    p.add_argument("--fresh", action="store_true",
                   help="measure again, even if the folder has measurements that fit")
    p.add_argument("--nodes", type=int, default=None, metavar="N",
                   help="plan for this number of nodes (default: the running nodes)")
    p.add_argument("--ranks-per-node", type=int, default=None, metavar="N",
                   help="plan for this number of ranks per node (default: the running ranks)")
    p.add_argument("--memory", default=None, metavar="SIZE",
                   help="memory of a rank, e.g. 8GiB (default: a GPU's memory, or a rank's share "
                        "of the node's)")
    p.add_argument("--nics", type=int, default=1,
                   help="network cards per node (default: %(default)s)")
    p.add_argument("--device", choices=("cpu", "cuda"), default=None,
                   help="default: cuda if a GPU is available, otherwise cpu")
    p.add_argument("--repeats", type=int, default=9,
                   help="number of timed repeats of each measurement (default: %(default)s)")


def recommend(args: argparse.Namespace) -> int:
    """Measure the ranks, plan the model, write the plan and print the result. Only rank 0 writes
    files and prints output.
    """
    from moe_plugin.cli.measure.own_cluster import own_ranks
    from moe_plugin.planner.model import load_model

    check_counts(args, "nodes", "ranks_per_node", "nics", "repeats", "top")
    if args.script is not None and args.host == "fairseq":
        raise ValueError(f"--script {short(args.script)} is for Megatron only. Use --host "
                         "megatron, or leave --script out")
    cuda = _cuda(args)
    model = load_model(args.model).in_host(args.host)
    if os.environ.get("RANK", "0") == "0":
        output_folder(args.out, FILES)
    # the layers' log lines during the measurements are of no use to the user
    with nullcontext() if args.verbose else quiet(), own_ranks(cuda) as comm:
        try:
            return _recommend(args, model, comm, cuda)
        except ValueError:
            if comm.rank:  # rank 0 reports the error
                return 2
            raise


def _cuda(args: argparse.Namespace) -> bool:
    import torch

    available = torch.cuda.is_available()
    if args.device == "cuda" and not available:
        raise ValueError("--device cuda needs a GPU, but torch finds none. Use --device cpu")
    return available if args.device is None else args.device == "cuda"


def _recommend(args: argparse.Namespace, model: ModelShape, comm: Comm, cuda: bool) -> int:
    import torch

    from moe_plugin.cli.measure.own_cluster import grid_of, rank_memory
    from moe_plugin.planner.cluster import Cluster, Device
    from moe_plugin.planner.units import parse_size

    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    grid = grid_of(comm)
    usable = rank_memory(device, grid[1]) if args.memory is None else float(parse_size(args.memory))
    memory = -comm.agree_max([-usable])[0]
    target = args.nodes or grid[0], args.ranks_per_node or grid[1]
    _check_links(grid, target)
    # searched once before measuring, so that a model that cannot be planned fails early
    _search(args, model, Cluster().resized(*target), Device(memory_bytes=memory))
    network, processor = _measured(args, model, comm, device, grid, memory)
    if processor is not None and comm.rank == 0:
        processor = dataclasses.replace(processor, device=dataclasses.replace(
            processor.device, memory_bytes=memory))
        cluster = (network.cluster if network else Cluster()).resized(*target)
        _write(args, model, _search(args, model, cluster, processor.device), cluster,
               processor.device)
    return 0


def _check_links(grid: tuple[int, int], wanted: tuple[int, int]) -> None:
    for name, unit, have, want in zip(("nodes", "ranks-per-node"), ("nodes", "ranks of a node"),
                                      grid, wanted, strict=True):
        if want > 1 and have == 1:
            raise ValueError(f"--{name} {want} needs measurements of the exchange between two "
                             f"{unit}, which are impossible with {grid[0]}x{grid[1]} ranks. Start "
                             f"the command on two {unit} or more")


def _search(args: argparse.Namespace, model: ModelShape, cluster: Cluster,
            device: Device) -> list[PlanCost]:
    """Return the plans that fit in memory, including plans that recompute the activations of some
    layers.
    """
    from moe_plugin.planner.all_to_all_cost import distinct
    from moe_plugin.planner.cluster import MAX_NUMBER
    from moe_plugin.planner.model_search import Space, search
    from moe_plugin.planner.plan_cost import recomputed

    space = Space(data_parallel_only=args.host == "fairseq", algorithms=distinct(cluster))
    keep = max(KEPT, args.top)
    larger = search(model, cluster, dataclasses.replace(device, memory_bytes=MAX_NUMBER), space,
                    keep=keep).plans
    saving = recomputed(model, larger, device.usable_bytes)
    try:
        return [*search(model, cluster, device, space, keep=keep).plans, *saving]
    except ValueError:
        if saving:
            return saving
        raise


def _measured(args: argparse.Namespace, model: ModelShape, comm: Comm, device: torch.device,
              grid: tuple[int, int], memory: float) -> tuple[MeasuredNetwork | None,
                                                             Processor | None]:
    """Return the measurements stored in the folder of rank 0 if they can be reused. Otherwise,
    measure the network and the processor, and store the results.

    Reused measurements are returned only on rank 0. The network is not measured if there is only
    one rank.
    """
    from moe_plugin.cli.measure.own_cluster import (
        about_network,
        about_processor,
        measure_network,
        measure_processor,
    )
    from moe_plugin.planner.model import MeasuredNetwork, Processor, dump

    network = None
    if comm.size > 1:
        about = about_network(model, grid, device)
        kept, network = _kept(args, comm, MeasuredNetwork, NETWORK, about)
        if not kept:
            network = measure_network(model, comm, grid, about, args.nics, args.repeats)
            if comm.rank == 0:
                write_regular(args.out / NETWORK, dump(network))
    about = about_processor(model, comm, device)
    kept, processor = _kept(args, comm, Processor, PROCESSOR, about)
    if not kept:
        processor = measure_processor(model, comm, device, memory, about, args.repeats)
        if comm.rank == 0:
            write_regular(args.out / PROCESSOR, dump(processor))
    return network, processor


def _kept(args: argparse.Namespace, comm: Comm, kind: type[Record], name: str,
          about: dict[str, str]) -> tuple[bool, Record | None]:
    """Return whether the folder of rank 0 contains measurements that can be reused. On rank 0, also
    return the stored measurements.
    """
    from moe_plugin.planner.model import load

    record, path = None, args.out / name
    if comm.rank == 0 and not args.fresh and path.exists():
        try:
            record = load(kind, path)
            other = [key for key in about if record.about.get(key) != about[key]]
            reason = f"{other[0]} was {record.about.get(other[0])}" if other else ""
        except ValueError as error:
            reason = str(error)
        if reason:
            record = None
        if not args.json:
            print(f"{path}: measured again, {short(reason)}" if reason else f"{path}: reused",
                  flush=True)
    return comm.agree_max([float(record is not None)])[0] > 0, record


def _write(args: argparse.Namespace, model: ModelShape, plans: list[PlanCost], cluster: Cluster,
           device: Device) -> None:
    """Write the fastest plan, and print the plans with their predicted step times."""
    import torch

    from moe_plugin.cli.planning.answer import breakdown, plan_lines, predicted

    plans = sorted(plans, key=lambda cost: (cost.seconds, cost.plan))[: args.top]
    best = plans[0]
    start = LaunchCommand(head=os.environ.get("MASTER_ADDR", "HEAD"), cpu=not _cuda(args),
                          threads=torch.get_num_threads(), data=args.data)
    text = write_plan(args, args.out, model, best, cluster, device, start, best.activations)
    if args.json:
        print(json.dumps({
            "plans": [{**breakdown(c), "activations": list(c.activations)} for c in plans],
            "fit_errors": {"device": device.fit_error, "cluster": cluster.fit_error},
            "launch": text}, indent=1))
        return
    print("\n".join([f"processor: {device.name}, {device.flops / 1e9:,.1f} GFLOP/s, half of it at "
                     f"{device.half_rows:.0f} rows", "", *plan_lines(plans), "",
                     predicted(best, cluster, device) + LEFT_OUT, "", text]), flush=True)
