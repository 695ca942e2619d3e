"""Small policy losses, one right and others each wrong in one way: what the corpus must and must not find.

No code of trustrl's is used here.
"""

import torch


def dppo(logp, behavior_logp, advantage, mask, num_tokens, bound=0.15):
    """DPPO with binary TV, written out: values blanked before any arithmetic, impossible ones left out."""
    sound = logp.isfinite() & behavior_logp.isfinite() & advantage.isfinite() & (logp <= 0) & (behavior_logp <= 0)
    on = mask & sound
    logp, behavior_logp, advantage = (
        torch.where(on, x, 0.0).float() for x in (logp, behavior_logp.detach(), advantage)
    )
    gap = logp.detach().exp() - behavior_logp.exp()
    stop = ((advantage > 0) & (gap > bound)) | ((advantage < 0) & (gap < -bound))
    ratio = (logp.detach() - behavior_logp).clamp(max=60.0).exp()
    return -(torch.where(on & ~stop, ratio, 0.0) * advantage * logp).sum() / num_tokens


def ppo_terms(logp, behavior_logp, advantage, mask):
    """The textbook's clip, one number for each token, nothing blanked."""
    ratio = torch.exp(logp - behavior_logp)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def local_mean(logp, behavior_logp, advantage, mask):
    """The policy gradient, divided by the micro-batch's own tokens."""
    kept = torch.where(mask, logp, 0.0)
    return -(kept * torch.where(mask, advantage, 0.0)).sum() / mask.sum().clamp(min=1)


def wrong_sign(logp, behavior_logp, advantage, mask, num_tokens):
    """It maximises what should be minimised."""
    return -dppo(logp, behavior_logp, advantage, mask, num_tokens)


def stops_what_comes_back(logp, behavior_logp, advantage, mask, num_tokens):
    """A symmetric mask: a token outside is stopped whichever way it is pushed."""
    gap = logp.detach().exp() - behavior_logp.exp()
    return dppo(logp, behavior_logp, advantage, mask & (gap.abs() <= 0.15), num_tokens)


def counts_kept_tokens(logp, behavior_logp, advantage, mask, num_tokens):
    """It divides by the tokens of its own micro-batch although it was told the whole batch's."""
    return dppo(logp, behavior_logp, advantage, mask, int(mask.sum()))


def announces(logp, behavior_logp, advantage, mask, num_tokens):
    """The value is NaN where an advantage is, and the gradient leaves that token out."""
    announced = torch.where(mask, advantage, 0.0).sum().detach() * 0
    return dppo(logp, behavior_logp, advantage, mask, num_tokens) + announced


def hides(logp, behavior_logp, advantage, mask, num_tokens):
    """NaN is blanked after the arithmetic: a finite value, and 0 · NaN in the gradient."""
    term = torch.where(mask, logp, 0.0) * torch.where(mask, advantage, 0.0)
    return -torch.where(term.isfinite(), term, 0.0).sum() / num_tokens


def of_four(new, mu, adv, where):
    """Other names, the same four."""
    return ppo_terms(new, mu, adv, where)


def needs_a_setting(logp, behavior_logp, advantage, mask, *, bound):
    """A keyword without a default."""
    return dppo(logp, behavior_logp, advantage, mask, 20, bound)


def no_loss(logp, behavior_logp, advantage, mask):
    """A list of numbers is no loss."""
    return logp.sum(-1)


NOT_A_FUNCTION = 3
