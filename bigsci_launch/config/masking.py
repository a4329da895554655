"""What may be shown or recorded of the values of variables, and what looks like a secret.

A list of names and forms that are secret is never complete. So a value is shown only if its name is known to hold none,
and if it does not look like one either.
"""

from __future__ import annotations

import re

SECRET = "<secret>"
"""Takes the place of a value that is not shown."""

_SHOWN = re.compile(
    r"(CUDA|NCCL|RCCL|GLOO|UCX|UCC|FI|OFI|MPI|OMPI|MPICH|PMI|PMIX|SLURM|SBATCH|SRUN|OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR"
    r"|TORCH|TORCHINDUCTOR|TORCHELASTIC|PYTORCH|TRITON|XLA|NVTE|NVIDIA|HIP|HSA|ROCR|ROCM|MIOPEN|LC)_\w+|PYTHON\w*"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|HOME|USER|LOGNAME|HOSTNAME|SHELL|LANG|TZ|PWD|TMPDIR|VIRTUAL_ENV"
    r"|CONDA_PREFIX|CONDA_DEFAULT_ENV|LOADEDMODULES|MODULEPATH|TOKENIZERS_PARALLELISM|BSL_(PATH|RUNS)"
)
_NO_SECRET = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "TOKENIZERS_PARALLELISM"})
"""Names that only look as if they held a secret."""
_SECRET_NAME = re.compile(
    r"TOKEN|KEY|WEBHOOK|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|PRIVATE|AUTHORIZATION|NETRC"
    r"|(^|_)(AUTH|PAT|PWD|JWT|DSN)(_|$)|(?<!BY)(?<!COM)PASS(_|$)",
    re.IGNORECASE,
)
# Tokens with an issuer's prefix, key blocks, signed tokens, passwords in addresses, and addresses that are passwords.
_SECRET_VALUE = re.compile(
    r"\b(gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{16,}|sk-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}"
    r"|A(KIA|SIA)[A-Z0-9]{16}|AIza[\w-]{30,}|npm_\w{30,}|pypi-\w{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|hvs\.[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]+|[sr]k_(live|test)_\w{16,}|dapi[0-9a-f]{32}|r8_\w{20,}|lin_api_\w{20,}"
    r"|dckr_pat_[\w-]{16,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=://)[^/\s@]+(?=@)|(?<=://)[^/\s:@]*:\S+(?=@)"
    r"|(?<=://)(hooks\.|[^\s'\"]+/(hooks|webhooks?|webhookb2)/)[^\s'\"]+"
    r"|(?<=AccountKey=)[^\s;'\"]+|(?<=[?&]sig=)[^\s&'\"]+|(?<=\bBearer )[\w.~+/=-]{8,}"
)


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable probably contains a secret, by its name or by what its value looks like."""
    return value != "" and (is_secret_name(name) or redact_text(value) != value)


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name usually contains a secret."""
    return _SECRET_NAME.search(name) is not None and name not in _NO_SECRET


def is_known(name: str) -> bool:
    """Return whether a variable is known to hold no secret, such as NCCL_DEBUG."""
    return _SHOWN.fullmatch(name) is not None and not is_secret_name(name)


def shown_value(name: str, value: str | None) -> str | None:
    return value if not value or (is_known(name) and redact_text(value) == value) else SECRET


def redact_text(text: str) -> str:
    """Return `text` with everything that looks like a secret replaced."""
    return _SECRET_VALUE.sub(SECRET, text)
