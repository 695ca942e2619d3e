"""`python -m trustrl.engines.openrlhf ...`: OpenRLHF's `train_ppo_ray` with its own arguments, after a check of them."""

from trustrl.engines.openrlhf.launcher import main

if __name__ == "__main__":
    main()
