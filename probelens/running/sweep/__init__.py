"""The one engine that runs interventions: ``plan`` chooses one of the strategies ``Full``, ``Skip`` and ``Resume``."""
