"""Speed of each op beside torch, torch.compile, installed rivals and its floor: `python -m benchmarks --help`."""
