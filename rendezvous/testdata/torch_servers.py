"""Hosts TCPStores: for each line "libuv" or "legacy" on stdin, starts one and prints its port."""

import sys
from datetime import timedelta

import torch.distributed as dist

stores = []
print("torch", dist.__name__, flush=True)
for line in sys.stdin:
    stores.append(
        dist.TCPStore(
            "127.0.0.1", 0, None, True, timedelta(seconds=30),
            wait_for_workers=False, use_libuv=line.strip() == "libuv",
        )
    )
    print(stores[-1].port, flush=True)
