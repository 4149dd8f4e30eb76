"""Which card of the driver is which GPU of PyTorch.

nvidia-smi, and so GPUtil, lists every card of the machine; PyTorch sees only those that CUDA_VISIBLE_DEVICES
leaves, in the order given there. The two lists are matched by UUID where PyTorch gives one, else by index.
"""

import os

import torch


def driver_view(indices: list[int]) -> tuple[list, str]:
    """GPUtil's card for each GPU index of PyTorch (None where it lists none), and a note for the reader.

    The note is empty where both count the same cards in the same order; else it says which is which, or why
    the driver's figures are missing.
    """
    try:
        import GPUtil  # here, since GPUtil 1.4.0 does not even import from Python 3.12 on without setuptools

        cards = GPUtil.getGPUs()
    except Exception as error:  # GPUtil picks nvidia-smi's text apart; PyTorch's figures are there whatever it says
        why = str(error) or type(error).__name__
        return [None] * len(indices), f"The driver's figures are missing: GPUtil failed ({why})."
    if not cards:
        return [None] * len(indices), "The driver's figures are missing: GPUtil found no nvidia-smi."
    uuids = [_uuid(getattr(torch.cuda.get_device_properties(index), "uuid", "")) for index in indices]
    if not all(uuids):
        return _by_index(indices, cards)
    by_uuid = {_uuid(card.uuid): card for card in cards}
    found = [by_uuid.get(uuid) for uuid in uuids]
    return found, _note(indices, found, cards, "UUID")


def _uuid(uuid) -> str:
    return str(uuid).lower().removeprefix("gpu-")  # nvidia-smi writes the prefix, PyTorch does not


def _by_index(indices: list[int], cards: list) -> tuple[list, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = visible.split(",") if visible else [str(card.id) for card in cards]
    by_id = {str(card.id): card for card in cards}
    found = [by_id.get(numbers[index].strip()) if index < len(numbers) else None for index in indices]
    return found, _note(indices, found, cards, "index, since PyTorch gave no UUID")


def _note(indices: list[int], found: list, cards: list, how: str) -> str:
    pairs = list(zip(indices, found, strict=True))
    seen = torch.cuda.device_count()
    if how == "UUID" and len(cards) == seen and all(card and card.id == index for index, card in pairs):
        return ""
    names = [
        f"cuda:{index} is " + (f"the driver's GPU {card.id}" if card else "not in the driver's list")
        for index, card in pairs
    ]
    counts = f"The driver lists {len(cards)} GPU(s), PyTorch sees {seen}"
    return f"{counts}: {', '.join(names)} (matched by {how})."
