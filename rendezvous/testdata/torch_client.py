"""Does with the TCPStore at host and port (arguments) all that torch's client can ask, and checks the answers."""

import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

host, port = sys.argv[1], int(sys.argv[2])


def client(**more):
    return dist.TCPStore(host, port, None, False, timedelta(seconds=20), **{"wait_for_workers": False, **more})


def raises(what, call):
    try:
        call()
    except what:
        return
    raise AssertionError(f"no {what}")


c = client()

# What a Go client has put there, and the other way around.
assert c.get("from-go") == b"go", c.get("from-go")
c.set("from-torch", "torch")

c.set("a", "v1")
assert c.get("a") == b"v1"
c.set("empty", "")
assert c.get("empty") == b""
assert c.compare_set("n", "", "x") == b"x"
assert c.compare_set("n", "", "y") == b"x"
assert c.compare_set("n", "x", "y") == b"y"
assert c.compare_set("n", "x", "z") == b"y"
assert c.compare_set("absent", "e", "x") == b"e"
assert not c.check(["absent"])
assert c.check(["a", "n"]) and not c.check(["a", "absent"])
assert c.add("k", 5) == 5 and c.add("k", -7) == -2 and c.get("k") == b"-2"
c.wait(["a", "n"])
raises(dist.DistStoreError, lambda: c.wait(["absent", "a"], timedelta(milliseconds=100)))
assert c.get("a") == b"v1"  # after a wait that was cancelled
c.append("ap", "12")
c.append("ap", "34")
assert c.multi_get(["ap", "n"]) == [b"1234", b"y"]
c.multi_set(["q", "r"], ["1", "22"])
assert c.multi_get(["q", "r"]) == [b"1", b"22"]
assert c.delete_key("q") and not c.delete_key("q") and not c.check(["q"])
raises(dist.DistNetworkError, lambda: client().add("ap", 1) if c.set("ap", "text") is None else None)
big = b"x" * (8 << 20)
c.set("big", big)
assert c.get("big") == big
c.delete_key("big")
keys = c.list_keys()
assert c.num_keys() == len(keys), (c.num_keys(), keys)
assert {"a", "n", "k", "ap", "r", "empty", "from-go", "from-torch"} <= set(keys), keys

# Queues, where the client has them.
if c.libuvBackend:
    assert c.queue_len("Q") == 0
    raises(dist.QueueEmptyError, lambda: c.queue_pop("Q", False))
    c.queue_push("Q", "1")
    c.queue_push("Q", "2")
    assert c.queue_len("Q") == 2 and c.check(["Q"])
    assert c.queue_pop("Q") == b"1" and c.queue_pop("Q") == b"2"
    assert not c.check(["Q"])

# A barrier: alone, too few, and enough.
c.barrier("alone", 1)
raises(dist.DistStoreError, lambda: c.barrier("few", 3, timedelta(milliseconds=100)))
client().barrier("few", 2, timedelta(seconds=10))  # the one that gave up stays counted, as in torch


# Waiting while others go on. Torch holds the GIL in some calls, so the other side is a Go client.
c.set("ready", "")
assert c.get("answer", ) == b"42"

# All the ways to connect.
client(wait_for_workers=True)
assert client(use_libuv=False).get("a") == b"v1"
prefixed = dist.PrefixStore("p", c)
prefixed.set("k", "in p")
assert c.get("p/k") == b"in p"
assert c.clone().get("a") == b"v1"

# Many waits that race with the set or the timeout: the stream must stay in step.
for i in range(200):
    key = f"race{i}"
    t = threading.Timer(0.001, lambda: client_of_timer.set(key, "v")) if i % 50 == 0 else None
    if t:
        client_of_timer = client()
        t.start()
    try:
        c.wait([key], timedelta(milliseconds=1))
    except dist.DistStoreError:
        pass
    assert c.add("step", 1) == i + 1
    if t:
        t.join()
print("ok", flush=True)
