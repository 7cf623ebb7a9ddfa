"""What must hold between settings."""

from ssfl.errors import ConfigError
from ssfl.methods import METHODS
from ssfl.settings import Config, Method, Privacy


def check(config: Config) -> None:
    """What must hold between settings."""
    split, method, federation = config.split, config.method, config.federation
    if config.data.name is not None and config.data.path is not None:
        raise ConfigError("set either data.name (such as digits) or data.path (your own images), not both")
    participants = split.users if federation.participants is None else federation.participants
    if participants > split.users:
        raise ConfigError(
            f"federation.participants = {participants} is more than split.users = {split.users}: "
            f"set it to at most {split.users}"
        )
    if federation.groups is not None and federation.groups > participants:
        raise ConfigError(
            f"federation.groups = {federation.groups} is more than the {participants} participants: "
            f"set it to at most {participants}"
        )
    if federation.groups not in (None, 1) and method.averaging != "grouping":
        raise ConfigError(
            f"federation.groups = {federation.groups} needs method.averaging = 'grouping', "
            f"not {method.averaging!r}"
        )
    if (federation.rounds is None) == (federation.epochs is None):
        raise ConfigError("set either federation.rounds or federation.epochs, not both or neither")
    if (method.averaging == "weighted") != (method.server_weight is not None):
        raise ConfigError(
            "method.averaging = 'weighted' and method.server_weight go together: set both, such as "
            "method.server_weight=0.5, or neither"
        )
    if method.averaging == "weighted" and method.server != "parallel":
        raise ConfigError("method.averaging = 'weighted' needs method.server = 'parallel'")
    if method.averaging in ("elastic", "overlap"):
        if method.server != "none":
            raise ConfigError(f"method.averaging = {method.averaging!r} needs method.server = 'none'")
        for key in ("slow", "residual", "server_momentum"):
            if getattr(method, key):
                raise ConfigError(
                    f"method.{key} does not go with models of the users' own ({method.averaging}): "
                    f"set method.{key}=0"
                )
    elif method.elasticity is not None:
        raise ConfigError("method.elasticity needs method.averaging = 'elastic' or 'overlap'")
    if method.server_replicas and (method.averaging, method.server) != ("grouping", "parallel"):
        raise ConfigError(
            "method.server_replicas needs method.averaging = 'grouping' and method.server = 'parallel'"
        )
    _check_round_labels(method, config.model.norm)
    own = method.averaging in ("elastic", "overlap") or method.objective == "fedmatch"
    if own and method.pace != "full":
        which = "objective" if method.objective == "fedmatch" else "averaging"
        raise ConfigError(
            f"method.pace = {method.pace!r} does not go with method.{which} = {getattr(method, which)!r}: "
            "set method.pace=full"
        )
    if method.server_momentum and method.server == "parallel":
        comes = _comes(method, "server_momentum")
        raise ConfigError(f"method.server_momentum needs method.server = 'alternate' or 'none'{comes}")
    if config.run.engine == "dist":
        _check_none_is_held(config, "run.engine = 'dist'", ", or use run.engine=auto")
    if method.averaging in ("elastic", "overlap"):
        _check_none_is_held(config, f"method.averaging = {method.averaging!r}")
    if method.guard and method.server != "alternate":
        raise ConfigError(
            f"method.guard needs method.server = 'alternate', not {method.server!r}{_comes(method, 'guard')}"
        )
    if method.head_start and method.server == "none":
        raise ConfigError(
            "method.head_start needs a server that trains, and method.server is 'none': set it to 0"
        )
    if method.check and method.server == "none":
        raise ConfigError(
            "method.check needs the server's labels, and method.server = 'none' has none: set "
            "method.check=false"
        )
    if config.run.engine == "dist" and own:
        which = "objective" if method.objective == "fedmatch" else "averaging"
        raise ConfigError(f"run.engine = 'dist' does not go with {_said(method, which)}: use 'auto'")
    if method.name == "fixmatch" and split.users != 1:
        raise ConfigError(f"method.name = 'fixmatch' is one model: set split.users=1, not {split.users}")
    if method.objective == "fedmatch":
        _check_fedmatch(config)
    if config.privacy != Privacy():
        _check_privacy(config)
    if split.shared and split.labels_at != "server":
        raise ConfigError("split.shared shares the server's images: use split.labels_at = 'server'")
    if method.objective == "none" and method.server == "none":
        raise ConfigError("nobody would train: set method.objective or method.server")
    if split.labels_at != "server" and method.objective == "none":
        raise ConfigError(
            f"{_said(method, 'objective')} does not train users: use split.labels_at = 'server'"
        )
    if split.labels_at == "users" and method.server != "none":
        unweighted = " and leave out method.averaging and method.server_weight"
        raise ConfigError(
            "split.labels_at = 'users' leaves the server no data: add method.server = "
            f"'none'{without_guard(method)}{unweighted if method.averaging == 'weighted' else ''}"
        )
    if config.run.test != "every" and not config.data.validation:
        raise ConfigError(
            f"run.test = {config.run.test!r} needs other images to look at: set data.validation=0.1"
        )
    if split.scheme == "mixture" and not split.mixtures:
        raise ConfigError("split.scheme = 'mixture' needs split.mixtures, a row of weights per kind of user")
    if config.train.nesterov and config.train.momentum == 0:
        raise ConfigError("train.nesterov = true needs train.momentum above 0: set train.nesterov=false")


def _in_row(method: Method, key: str) -> bool:
    """Whether a setting is as it comes with the method's name."""
    found: bool = METHODS[method.name]["method"].get(key) == getattr(method, key)
    return found


def _comes(method: Method, key: str) -> str:
    """A hint, where a setting came with the method's name."""
    if not _in_row(method, key):
        return ""
    return f"; it comes with method.name = {method.name!r}: begin from another, such as method.name=alternate"


def _said(method: Method, key: str) -> str:
    """What a person said to get a setting: the method's name where it comes with that, else the setting."""
    if _in_row(method, key):
        return f"method.name = {method.name!r}"
    return f"method.{key} = {getattr(method, key)!r}"


def without_guard(method: Method) -> str:
    """What besides method.server = 'none' is to be said where there is a guard."""
    if not method.guard:
        return ""
    return " and begin from method.name=alternate" if _in_row(method, "guard") else " and method.guard=false"


def _check_none_is_held(config: Config, where: str, otherwise: str = "") -> None:
    """Where users' models are not held together before they are averaged, what needs that is refused."""
    method, attackers = config.method, config.federation.attackers
    held = [
        (method.gate, "method.gate = true", "method.gate=false"),
        (method.check, "method.check = true", "method.check=false"),
        (method.combine != "mean", f"method.combine = {method.combine!r}", "method.combine=mean"),
        (method.weighting != "even", f"method.weighting = {method.weighting!r}", "method.weighting=even"),
        (method.fill, "method.fill = true", "method.fill=false"),
        (method.thresholds == "balanced", "method.thresholds = 'balanced'", "method.thresholds=fixed"),
        (attackers > 0, f"federation.attackers = {attackers}", "federation.attackers=0"),
    ]
    for wanted, given, instead in held:
        if wanted:
            raise ConfigError(f"{given} does not go with {where}: set {instead}{otherwise}")


def _check_round_labels(method: Method, norm: str) -> None:
    """What goes with labels once a round alone, and what they do not go with."""
    if method.labels == "round":
        if method.objective != "consistency" or method.views != "separate":
            raise ConfigError(
                "method.labels = 'round' needs method.objective = 'consistency' and method.views = "
                f"'separate'{_comes(method, 'labels')}"
            )
        if method.teacher_mode != "eval":
            raise ConfigError(
                "method.labels = 'round' needs method.teacher_mode = 'eval': labels are made before training"
            )
        if method.sharpness and norm == "batch":
            raise ConfigError("method.sharpness needs model.norm = 'group' or 'none'")
        if method.weighting != "even" and method.combine != "mean":
            raise ConfigError(f"method.weighting = {method.weighting!r} needs method.combine = 'mean'")
        if method.fill and (method.combine != "mean" or method.check):
            raise ConfigError("method.fill needs method.combine = 'mean' and method.check = false")
        return
    plain = Method()
    for key in ("thresholds", "fill", "mix", "sharpness", "weighting", "pace"):
        given, instead = getattr(method, key), getattr(plain, key)
        if given != instead:
            raise ConfigError(
                f"method.{key} = {given!r} needs method.labels = 'round': set that, or "
                f"method.{key}={str(instead).lower()}"
            )


def _check_fedmatch(config: Config) -> None:
    """What FedMatch cannot do."""
    method, train = config.method, config.train
    settled = [
        (config.model.norm != "batch", f"model.norm = {config.model.norm!r}", "model.norm=none"),
        (method.averaging == "fedavg", f"method.averaging = {method.averaging!r}", "method.averaging=fedavg"),
        (method.views == "separate", f"method.views = {method.views!r}", "method.views=separate"),
        (method.proximal == 0, f"method.proximal = {method.proximal}", "method.proximal=0"),
        (train.momentum == 0, f"train.momentum = {train.momentum}", "train.momentum=0"),
        (train.clip == 0, f"train.clip = {train.clip}", "train.clip=0"),
        (train.lr < 0.1, f"train.lr = {train.lr}, which draws ψ beyond σ", "train.lr below 0.1"),
        (config.run.diversity_every == 0, "gradient diversity", "run.diversity_every=0"),
    ]
    for fits, given, instead in settled:
        if not fits:
            raise ConfigError(f"method.objective = 'fedmatch' does not go with {given}: set {instead}")
    if method.server == "parallel" or (method.server == "none" and config.split.labels_at == "server"):
        raise ConfigError(
            f"method.objective = 'fedmatch' does not go with method.server = {method.server!r}: set "
            "method.server=alternate, or method.server=none and split.labels_at=users"
        )


def _check_privacy(config: Config) -> None:
    """Where clipping and noise on what users send would not keep the promise, they are refused."""
    privacy, method, users = config.privacy, config.method, config.split.users
    if privacy.clip is None or privacy.noise is None:
        raise ConfigError("privacy.clip and privacy.noise go together: set both, such as 1.0 and 0.5")
    if privacy.delta is not None and privacy.delta * users >= 1:
        raise ConfigError(f"privacy.delta = {privacy.delta} is no promise to {users} users: set it below 1/K")
    broken = [
        (method.objective == "fedmatch", "method.objective = 'fedmatch' shows users' weights to others"),
        (method.objective == "none", f"{_said(method, 'objective')} does not train users"),
        (method.averaging in ("elastic", "overlap"), f"method.averaging = {method.averaging!r} keeps models"),
        (
            method.weighting != "even",
            f"method.weighting = {method.weighting!r} tells what users do not noise",
        ),
        (method.fill, "method.fill tells which users are sure of nothing"),
        (method.thresholds == "balanced", "method.thresholds = 'balanced' tells users' counts"),
        (config.train.momentum_policy == "slot", "train.momentum_policy = 'slot' hands momentum on"),
    ]
    for true, why in broken:
        if true:
            raise ConfigError(f"[privacy] cannot hold: {why}; change that, or leave [privacy] out")
