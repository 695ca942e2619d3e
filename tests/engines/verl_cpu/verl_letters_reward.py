"""A reward that differs between any two responses of a random model, so that there is always something to learn."""


def reward(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(ord(letter) % 7 for letter in solution_str) / (6 * 8)
