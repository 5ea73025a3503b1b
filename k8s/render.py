"""Renders every overlay into rendered/, and makes the PrometheusRule of the alerts: `python k8s/render.py`, with kubectl.

What is rendered is kept, so that a change of a base shows what it changes in each overlay, and so that tests need no kubectl.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

HERE = Path(__file__).parent
OBSERVABILITY = HERE / "observability"


def overlays() -> list[Path]:
    """Every directory that can be applied: all with a kustomization.yaml but those that others build on."""
    return sorted(path.parent for path in HERE.rglob("kustomization.yaml") if path.parent not in (HERE / "base", HERE / "tls"))


def rendered_file(overlay: Path) -> Path:
    """Where an overlay's rendered resources are kept."""
    return HERE / "rendered" / f"{overlay.relative_to(HERE).as_posix().replace('/', '-')}.yaml"


def render(overlay: Path) -> str:
    """The overlay's resources as YAML. Raises CalledProcessError where kustomize refuses it."""
    return subprocess.run(["kubectl", "kustomize", str(overlay)], stdout=subprocess.PIPE, check=True, text=True).stdout


def prometheus_rule() -> str:
    """The alerts, which Prometheus reads as they are, in the form that its operator reads."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "inference"},
        "spec": yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text()),
    }
    return "# Made of alerts.yaml by render.py.\n" + yaml.safe_dump(rule, sort_keys=False, width=140)


def main() -> None:
    (OBSERVABILITY / "prometheusrule.yaml").write_text(prometheus_rule())
    for overlay in overlays():
        rendered_file(overlay).write_text(render(overlay))


if __name__ == "__main__":
    main()
