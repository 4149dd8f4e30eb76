"""Cut the bundled data out of two Debian packages. Run it once; its results are committed.

    apt-get download dataset-fashion-mnist r-cran-janeaustenr
    dpkg -x dataset-fashion-mnist_*.deb unpacked; dpkg -x r-cran-janeaustenr_*.deb unpacked
    python3 data/make_data.py unpacked

It needs NumPy, and writes the same bytes every time. SHA256SUMS holds the checksums, which helpers/data.py
compares whenever it reads a file.
"""

import gzip
import hashlib
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

SEED = 0
KEPT_PER_CLASS = {"train": 400, "t10k": 100}  # 4,000 and 1,000 images: the images stay under 4 MB
DATA = Path(__file__).resolve().parent
RAW = DATA / "FashionMNIST" / "raw"
NOVEL = "pride_and_prejudice.txt"


def read_idx(path):
    """The array in a gzipped idx file: two zero bytes, a type, a rank, the sizes, then bytes."""
    content = gzip.decompress(path.read_bytes())
    rank = content[3]
    sizes = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * rank).reshape(sizes)


def write_idx(path, array):
    """Unzipped, since torchvision.datasets.FashionMNIST looks for the unzipped file only."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + np.ascontiguousarray(array).tobytes())


def balanced_choice(labels, per_class, generator):
    """Indices of `per_class` images of every class, in an order that mixes the classes."""
    chosen = [generator.permutation(np.flatnonzero(labels == label))[:per_class] for label in range(10)]
    return generator.permutation(np.concatenate(chosen))


def cut_images(source):
    generator = np.random.Generator(np.random.PCG64(SEED))
    RAW.mkdir(parents=True, exist_ok=True)
    for part, per_class in KEPT_PER_CLASS.items():
        images = read_idx(source / f"{part}-images-idx3-ubyte.gz")
        labels = read_idx(source / f"{part}-labels-idx1-ubyte.gz")
        keep = balanced_choice(labels, per_class, generator)
        write_idx(RAW / f"{part}-images-idx3-ubyte", images[keep])
        write_idx(RAW / f"{part}-labels-idx1-ubyte", labels[keep])


def r_objects(path):
    """The serialized objects of an R lazy-load database: each is a length of 4 bytes and a zlib stream."""
    content = path.read_bytes()
    while content:
        stream = zlib.decompressobj()
        yield stream.decompress(content[4:])
        content = stream.unused_data


def r_strings(serialized):
    """The strings of one R character vector in R's binary format, version 3."""
    start = serialized.index(b"UTF-8") + len(b"UTF-8") + 4  # past the header and the vector's type
    (count,) = struct.unpack_from(">I", serialized, start)
    start += 4
    for _ in range(count):
        (length,) = struct.unpack_from(">I", serialized, start + 4)
        yield serialized[start + 8 : start + 8 + length].decode("utf-8")
        start += 8 + length


def cut_text(database):
    for lines in map(list, map(r_strings, r_objects(database))):
        if lines[0] == "PRIDE AND PREJUDICE":
            text = "\n".join(line.rstrip() for line in lines).strip() + "\n"
            (DATA / NOVEL).write_bytes(text.encode("utf-8"))
            return
    raise SystemExit(f"{database} holds no novel that begins PRIDE AND PREJUDICE")


def main(unpacked):
    cut_images(unpacked / "usr/share/datasets/fashion-mnist")
    cut_text(unpacked / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    files = [*sorted(RAW.iterdir()), DATA / NOVEL]
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(DATA).as_posix()}\n" for file in files]
    (DATA / "SHA256SUMS").write_text("".join(sums), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
