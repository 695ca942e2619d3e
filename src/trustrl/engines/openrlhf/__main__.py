"""`python -m trustrl.engines.openrlhf ...`: OpenRLHF's `train_ppo_ray` with its own arguments, which it checks."""

from trustrl.engines.openrlhf.launcher import main

if __name__ == "__main__":
    main()
