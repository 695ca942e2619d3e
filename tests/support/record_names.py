"""Names of a record's files, for tests."""

from trustrl.recording.part_names import PartName


def part_name(step, rank):
    """Returns the file name for one step on one rank, as the first process of the rank writes it."""
    return str(PartName(step, step, rank))
