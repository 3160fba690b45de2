"""The Go tree's own source as training and held-out text.

The rule is shared word for word with the Go package examples/moe/model
(corpus.go):

  * every file below GOROOT/src whose name ends in .go, except files with a
    path element "testdata", files above 200000 bytes, empty files, files that
    hold a zero byte and files with "Code generated" in their first 1024 bytes;
  * a file is held out when the first byte of the SHA-256 of its directory's
    path (slash separated, relative to GOROOT/src, "." for src itself) is below
    26, about one directory in ten; otherwise it is training text;
  * a held-out file whose content equals that of a training file is dropped, as
    is every repetition of a content within one side (the first path stays);
  * the held-out sample of n bytes takes the held-out files in the order of the
    SHA-256 of their paths; of each it takes one piece of at most 2048 bytes,
    at offset (first 8 bytes of that hash, big endian) mod (size - 2048 + 1),
    or the whole file where it is shorter, until n bytes are gathered (the last
    piece is cut).
"""

import hashlib
import os
import subprocess

PIECE = 2048
MAX_FILE = 200_000
HELD_OUT_BELOW = 26


def goroot():
    return subprocess.check_output(["go", "env", "GOROOT"], text=True).strip()


def corpus(root=None):
    """Returns (train, held_out): lists of (path, bytes) sorted by path."""
    src = os.path.join(root or goroot(), "src")
    sides = ([], [])
    for base, dirs, files in os.walk(src):
        dirs[:] = [d for d in dirs if d != "testdata"]
        rel = os.path.relpath(base, src).replace(os.sep, "/")
        side = 1 if hashlib.sha256(rel.encode()).digest()[0] < HELD_OUT_BELOW else 0
        for name in files:
            if not name.endswith(".go"):
                continue
            full = os.path.join(base, name)
            if os.path.islink(full) or not 0 < os.path.getsize(full) <= MAX_FILE:
                continue
            with open(full, "rb") as f:
                text = f.read()
            if b"\0" in text or b"Code generated" in text[:1024]:
                continue
            sides[side].append((name if rel == "." else rel + "/" + name, text))
    seen = set()
    out = []
    for side in sides:  # training first: a held-out repetition is dropped
        kept = []
        for path, text in sorted(side, key=lambda f: f[0].encode()):
            h = hashlib.sha256(text).digest()
            if h not in seen:
                seen.add(h)
                kept.append((path, text))
        out.append(kept)
    return out[0], out[1]


def sample(held_out, n):
    """Returns the pieces (bytes) of the held-out sample of n bytes."""
    pieces = []
    for path, text in sorted(held_out, key=lambda f: hashlib.sha256(f[0].encode()).digest()):
        if n <= 0:
            break
        off = 0
        if len(text) > PIECE:
            h = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")
            off = h % (len(text) - PIECE + 1)
        piece = text[off : off + PIECE][:n]
        pieces.append(piece)
        n -= len(piece)
    return pieces


if __name__ == "__main__":
    train, held = corpus()
    for name, side in (("train", train), ("held-out", held)):
        print(f"{name}: {len(side)} files, {sum(len(t) for _, t in side)} bytes, "
              f"{len({os.path.dirname(p) for p, _ in side})} directories")
