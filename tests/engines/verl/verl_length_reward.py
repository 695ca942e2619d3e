"""A reward that differs between the responses of a random model, so that there is something to learn."""


def reward(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(letter.isdigit() for letter in solution_str) / 8
