"""lm-eval's own `local-completions` model, in a process of its own: it asks a server, tells JSON.

Reads {"options": of the model, "tokens": [[context ids, continuation ids]], "texts": [[context,
continuation]], "rolling": [[text]], "until": [[text, {}]]}, any of them, and writes what lm-eval
makes of each.
"""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

KINDS = {
    "texts": "loglikelihood",
    "rolling": "loglikelihood_rolling",
    "until": "generate_until",
}


def main() -> None:
    asked = json.load(sys.stdin)
    model = LocalCompletionsAPI(**asked["options"])
    told: dict[str, object] = {"backend": model.tokenizer_backend}
    if "tokens" in asked:
        pairs = [(("", ""), context, continuation) for context, continuation in asked["tokens"]]
        told["tokens"] = list(model._loglikelihood_tokens(pairs))
    for name, kind in KINDS.items():
        if name in asked:
            requests = [Instance(kind, {}, tuple(each), 0) for each in asked[name]]
            told[name] = list(getattr(model, kind)(requests))
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
