"""Commands for clusters: `calibrate`, `profile-device`, `simulate all-to-all`, `simulate routing`.

`calibrate` and `profile-device` measure the network and the processor, and write the files that
`moe-plugin plan` reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

from moe_plugin.utils.checkout import laboratory
from moe_plugin.utils.regular_files import check_output, write_regular


def calibrate_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin calibrate`."""
    from moe_plugin.cli.figures import add_exchange_sizes

    p.description = ("Measures linear, 2dh and leader all-to-all for several sizes and fits the "
                     "cost per message and per byte of the links. `auto` (comm.cluster) and "
                     "`moe-plugin simulate` predict times from the result. To measure your own "
                     "ranks, start the command with torchrun on each node. To measure an emulated "
                     "cluster, give several small grids.")
    add_exchange_sizes(p, "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB")
    p.add_argument("--nics", type=int, default=1,
                   help="network cards per node (default: %(default)s)")
    p.add_argument("--name", default="cluster",
                   help="name of the cluster in the file (default: %(default)s)")
    p.add_argument("--out", type=Path, default=Path("cluster.yaml"), metavar="FILE",
                   help="file to write (default: %(default)s)")


def calibrate(args: argparse.Namespace) -> int:
    """Measure the network, fit the link model to the measurements, and write the fitted model to a
    file. Print how well the fitted model predicts the measured times.
    """
    from moe_plugin.cli.measure.all_to_all import NAMES, Plan, measure_rows, measurements_of
    from moe_plugin.planner import Cluster, dump_cluster
    from moe_plugin.planner.fit import fit
    from moe_plugin.planner.units import parse_size

    check_output(args.out)
    rows, about = measure_rows(
        args,
        Plan(tuple(NAMES.split(",")), tuple(map(parse_size, args.sizes.split(","))), args.repeats),
        "calibrate")
    if not rows:
        return 0  # only rank 0 gets rows
    last = rows[-1]
    shape = Cluster(name=args.name, nodes=last.nodes, ranks_per_node=last.ranks_per_node,
                    nics=args.nics)
    result = fit(measurements_of(rows), shape, emulated=bool(args.emulate))
    grids = ", ".join(dict.fromkeys(f"{row.nodes}x{row.ranks_per_node}" for row in rows))
    comment = (
        f"Fitted by `moe-plugin calibrate` to {len(rows)} exchanges on {grids} ranks "
        f"({', '.join(f'{k} {v}' for k, v in about.items())}).\n"
        f"Relative error of the fit: mean {result.mean_error:.1%}, largest {result.max_error:.1%}.")
    write_regular(args.out, dump_cluster(result.cluster, comment))
    print(f"{args.out}: {comment}")
    return 0


def profile_device_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin profile-device`."""
    p.description = ("Measures matmuls with few and with many rows, copies, and the smallest "
                     "operation, as one rank observes them.")
    p.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                   help="dtype of the matmuls (default: %(default)s)")
    p.add_argument("--model-dim", type=int, default=512,
                   help="width of a token (default: %(default)s)")
    p.add_argument("--hidden-dim", type=int, default=2048,
                   help="inner width of an expert (default: %(default)s)")
    p.add_argument("--out", type=Path, default=Path("device.yaml"), metavar="FILE",
                   help="file to write (default: %(default)s)")
    p.add_argument("--kernels", type=Path, default=None, metavar="FILE",
                   help="also measure each way to compute experts by their rows, for `moe-plugin "
                        "plan --prefill`")
    p.add_argument("--experts", type=int, default=8, metavar="N",
                   help="with --kernels: number of experts per rank (default: %(default)s)")


def profile_device(args: argparse.Namespace) -> int:
    """Measure the processor and write the file that `plan` reads."""
    import torch
    import yaml

    from moe_plugin.cli.measure.own_cluster import measure_device, measure_kernels
    from moe_plugin.planner.units import show_time

    for path in (args.out, args.kernels):
        if path:
            check_output(path)
    sizes = args.device, getattr(torch, args.dtype), args.model_dim, args.hidden_dim
    found = measure_device(*sizes)
    values = {
        k: v if isinstance(v, str) else float(f"{v:.4g}")
        for k, v in dataclasses.asdict(found).items()
    }
    text = (f"# Measured by `moe-plugin profile-device`: {args.dtype} on {args.device}, width "
            f"{args.model_dim}, inner width {args.hidden_dim}.\n")
    write_regular(args.out, text + yaml.safe_dump(values, sort_keys=False))
    print(f"{args.out}: {found.flops / 1e9:.1f} GFLOP/s, half of it at {found.half_rows:.0f} rows, "
          f"{found.memory_bytes_s / 1e9:.1f} GB/s, {show_time(found.launch_s)} per operation")
    if args.kernels:
        kernels = measure_kernels(*sizes, args.experts)
        text = text.replace("`:", f" --kernels`: {args.experts} experts,")
        write_regular(args.kernels, text + yaml.safe_dump({"kernels": kernels}, sort_keys=False))
        print(f"{args.kernels}: {', '.join(kernels)}")
    return 0


def simulate_all_to_all_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin simulate all-to-all`."""
    p.description = ("Predicts from a cluster file (written by `moe-plugin calibrate`, or one of "
                     "configs/clusters) how long each all-to-all takes, and which is the fastest.")
    p.add_argument("--cluster", required=True, metavar="FILE", help="cluster file")
    p.add_argument(
        "--ranks", default="2,4,8,16,32,64,128,256,512,1024,2048,4096", metavar="LIST",
        help="numbers of ranks; ranks per node: as in the cluster file (default: %(default)s)")
    p.add_argument("--sizes", default="64KiB,1MiB,32MiB,256MiB", metavar="LIST",
                   help="message sizes in bytes per rank (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    p.add_argument("--plot", metavar="FILE",
                   help="also plot the time against the number of ranks (.png or .svg)")


def simulate_all_to_all(args: argparse.Namespace) -> int:
    """Predict the times of all-to-all algorithms and print them."""
    from moe_plugin.cli.planning.answer import plot_model, predicted_parts
    from moe_plugin.planner import load_cluster, predict_table
    from moe_plugin.planner.units import parse_counts, parse_size

    ranks = parse_counts("--ranks", args.ranks, "16,256,4096")
    rows = predict_table(load_cluster(args.cluster), ranks,
                         [parse_size(word) for word in args.sizes.split(",")])
    if args.json:
        print(json.dumps({"cluster": args.cluster, "rows": rows}, indent=2))
    else:
        print("\n\n".join(predicted_parts(rows)))
    if args.plot:
        plot_model(rows, args.plot)
    return 0


def simulate_routing_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `moe-plugin simulate routing`."""
    from moe_plugin.cli.figures import add_links

    p.description = ("Replays routing traces (observe.trace, or Megatron's "
                     "--moe-routing-trace-path) in the planner. Predicts the time of each policy "
                     "for overloaded experts on a cluster, compared with forced balance. With "
                     "--emulate, the layer itself also runs with the traces, on nodes that this "
                     "machine emulates (Linux, root).")
    p.add_argument("trace", metavar="FOLDER",
                   help="folder of the trace, with router_trace_rank0.jsonl and so on")
    p.add_argument("--model", required=True, metavar="FILE", help="model file (configs/plans)")
    p.add_argument("--cluster", required=True, metavar="FILE", help="cluster file")
    p.add_argument("--device", required=True, metavar="FILE", help="device file")
    p.add_argument("--nodes", type=int, default=None, metavar="N",
                   help="nodes that share the experts (default: one node with all ranks of the "
                        "trace)")
    p.add_argument("--ranks-per-node", type=int, default=None, metavar="N",
                   help="ranks per node (default: as in the cluster file)")
    p.add_argument("--tokens", type=int, default=None, metavar="N",
                   help="scale the trace to this number of tokens per rank (default: unchanged)")
    p.add_argument("--guests", type=int, default=2, metavar="N",
                   help="number of experts that a rank may borrow (parallel.guests; default: "
                        "%(default)s)")
    p.add_argument("--replan", type=int, default=10, metavar="N",
                   help="number of steps between two placements of replicas (parallel.replan; "
                        "default: %(default)s)")
    p.add_argument("--emulate", metavar="NxP", help="nodes x ranks per node of an emulated "
                   "cluster, e.g. 2x2, on which the layer runs in float32. --cluster and --device "
                   "must describe this cluster, e.g. configs/clusters/emulated.yaml and "
                   "configs/devices/cpu_core.yaml")
    p.add_argument("--steps", type=int, default=None, metavar="N",
                   help="with --emulate: number of steps to replay, a third each from the "
                        "beginning, the middle and the end of the trace (default: 12)")
    add_links(p)
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def simulate_routing(args: argparse.Namespace) -> int:
    """Predict the step times for a routing trace with the planner, and print the predictions."""
    from moe_plugin.cli.figures import refuse_links
    from moe_plugin.cli.plan import check_counts
    from moe_plugin.observe.traces import read_traces
    from moe_plugin.planner.cluster import load_cluster, load_device
    from moe_plugin.planner.model import load_model
    from moe_plugin.planner.routing_replay import as_dict, explain, replay

    check_counts(args, "nodes", "ranks_per_node", "tokens", "guests", "replan", "steps")
    if args.emulate is not None:
        return _emulate_routing(args)
    if args.steps is not None:
        raise ValueError(f"--steps {args.steps} needs --emulate. Add --emulate, or leave --steps "
                         "out")
    refuse_links(args)
    cluster, ranks = load_cluster(args.cluster), None
    if args.nodes or args.ranks_per_node:
        cluster = cluster.resized(args.nodes or 1, args.ranks_per_node)
        ranks = cluster.ranks
    result = replay(read_traces(args.trace), load_model(args.model), cluster,
                    load_device(args.device), args.guests, args.replan, ranks, args.tokens)
    print(json.dumps(as_dict(result), indent=1) if args.json else explain(result))
    return 0


def _emulate_routing(args: argparse.Namespace) -> int:
    """Run the layer on an emulated cluster with the expert choices of a routing trace, and print
    the measured times.
    """
    from moe_plugin.cli.figures import links_of
    from moe_plugin.observe.traces import read_traces
    from moe_plugin.planner.model import load_model
    from moe_plugin.planner.units import parse_grid

    if args.nodes or args.ranks_per_node:
        raise ValueError(f"--emulate {args.emulate} already sets the nodes and ranks per node. "
                         "Leave --nodes and --ranks-per-node out")
    replayed = laboratory("bench.replayed")
    where = replayed.Emulation(parse_grid(args.emulate), links_of(args), load_model(args.model),
                               os.path.abspath(args.cluster), os.path.abspath(args.device),
                               args.guests, args.replan)
    steps = replayed.excerpt(read_traces(args.trace), where.model.experts, where.ranks,
                             args.steps or replayed.STEPS, args.tokens)
    result = replayed.emulate(steps, where)
    print(json.dumps(replayed.as_json(result), indent=1) if args.json else
          replayed.explain(result, args.emulate))
    return 0
