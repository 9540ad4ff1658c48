"""Results that a command remakes, each a module with

    run(*, say, **options) -> dict      figures, ready for JSON; `say(line)` tells how far it is; what `run` names are the options
                                        of `dpformer reproduce` that it takes
    show(figures) -> str | Table        for people
    markdown(figures) -> str            optional: the page that is committed beside the figures

They are looked up by name, so that asking for one imports only that one.
"""

RESULTS: dict[str, str] = {
    "transitions": "dpformer.experiments.reproduce.transitions",
}
