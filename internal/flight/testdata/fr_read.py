"""Runs torch's analyser on directories of dumps and prints, as JSON, what it makes of each; for the directory "-" the
keys of torch's own dump of a gloo group."""

import json
import logging
import os
import pickle
import sys
import tempfile

os.environ["TORCH_FR_BUFFER_SIZE"] = "16"


def analyse(path):
    from torch.distributed.flight_recorder import fr_trace

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    out = {"error": "", "collectives": []}
    try:
        with tempfile.TemporaryDirectory() as tmp:
            db = os.path.join(tmp, "db")
            fr_trace.main([path, "-p", "serry_trace_rank_", "--allow-incomplete-ranks", "-o", db])
            with open(db, "rb") as f:
                _, tables = pickle.load(f)
        for c in tables.collectives:
            out["collectives"].append({
                "group": c.pg_desc, "name": c.collective_name, "seq": c.collective_seq_id, "state": c.collective_state,
                "ranks": sorted(c.expected_ranks), "missing": sorted(c.missing_ranks or []), "pass": c.pass_check,
            })
        out["groups"] = sorted([g.id.split("@")[0], g.desc, g.size] for g in tables.groups)
    except Exception as e:
        out["error"] = f"{type(e).__name__}: {e}"
    logger.removeHandler(handler)
    out["log"] = "\n".join(lines)
    return out


def own_keys():
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    with tempfile.TemporaryDirectory() as tmp:
        dist.init_process_group("gloo", init_method=f"file://{tmp}/store", rank=0, world_size=1)
        dist.all_reduce(torch.ones(8))
        dist.barrier()
        dump = pickle.loads(_dump_fr_trace())
        dist.destroy_process_group()

    def kind(v):
        return "list" if isinstance(v, list) else type(v).__name__

    e = dump["entries"][0]
    return {
        "version": dump["version"],
        "top": sorted(dump),
        "entry": {k: kind(v) for k, v in e.items()},
        "config": sorted(next(iter(dump["pg_config"].values()))),
        "status": sorted(next(iter(dump["pg_status"].values()))),
        "values": {k: e[k] for k in ("profiling_name", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes")},
        "barrier": {k: dump["entries"][1][k] for k in ("profiling_name", "input_sizes", "input_dtypes")},
    }


print(json.dumps({p: own_keys() if p == "-" else analyse(p) for p in sys.argv[1:]}))
