"""Ways to save a state, some safe, for the answers that tests give to exercises."""

import io
import os

import torch


def in_place(state, path):
    torch.save(state, path)


def from_a_buffer(state, path):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getvalue())


def into_an_open_file(state, path):
    with open(path, "wb") as file:
        torch.save(obj=state, f=file)
        os.fsync(file.fileno())


def renamed(write=in_place, rename=None, temporary="unfinished.tmp"):
    """Writes another file of the folder first. A check may watch os.replace, so it is looked up when it is called."""

    def answer(state, final):
        write(state, final.with_name(temporary))
        (rename or os.replace)(final.with_name(temporary), final)

    return answer


def copied(old, new):
    new.write_bytes(old.read_bytes())
    old.unlink()
