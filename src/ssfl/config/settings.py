"""Every setting as a field of a frozen dataclass, with its description as the docstring below it.

A setting that is None gets its value when the data are known; the resolved config of a run shows that value.
`loading.py` reads and writes configs. [method] holds the name of a method and the settings of that method,
which are defined in `methods/`. "The paper" is Zhang et al. 2020, arXiv 2008.11364.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ssfl import methods
from ssfl.core.fields import setting

if TYPE_CHECKING:
    from ssfl.federation import Method


@dataclass(frozen=True)
class DataSettings:
    """[data] The images: where they come from and how they are read."""

    name: str | None = setting(
        None, choices=("digits", "cifar10", "svhn", "emnist", "stl10"), paths=True, instead="path"
    )
    """A known data set: digits, cifar10, svhn, emnist, stl10; or FILE.py:NAME or package.module:NAME, a
    function that returns an ssfl.Data. Images that were passed from Python are "in memory"."""
    path: str | None = setting(None, instead="name")
    """Your own images instead: an .npz file (x_train, y_train, x_test, y_test) or an image folder."""
    root: str = "data"
    """The folder that holds the known data sets' official files."""
    download: bool = False
    """Whether missing official files may be downloaded."""
    size: int | None = setting(None, least=4, most=1024, what="pixels")
    """Resize all images to this many pixels square."""
    test_fraction: float = setting(0.2, least=0.01, most=0.9, what="a part of the labelled images")
    """The part of a folder's labelled images held out for testing if it has no test/ of its own. With
    run.folds none are held out: each labelled image is tested in its fold."""
    validation: float = setting(0.0, least=0, most=0.5, what="a part of the training images")
    """The part of the training images that is set aside before the split as validation images, to choose
    settings with."""
    flip: bool | None = None
    """Whether views may be mirrored. Default: yes, but no for digits and letters and where most images are
    grey by their pixel values."""
    views: str = setting("standard", choices=("standard", "gentle"))
    """The augmentation. "standard": weak views are shifted, strong ones also go through random operations and
    Cutout (paper). "gentle", for pretrained networks: both are slightly rotated, zoomed and shifted, and
    differ slightly in brightness and contrast."""
    test_views: int = setting(0, least=0, most=64, what="views of an image besides the image itself")
    """Average the prediction for an image over the image itself and this many gentle views of it (test-time
    augmentation), when a model is evaluated and in `ssfl predict`. Each view costs one more prediction per
    image. The preset pictures uses 8."""
    broken: str = setting("skip", choices=("skip", "stop"))
    """What to do about image files that cannot be read: "skip" leaves them out with a warning, "stop" ends
    the command with an error. Either message names the files."""


@dataclass(frozen=True)
class SplitSettings:
    """[split] How the images are divided among the server and the users."""

    scheme: str = setting("skew", choices=("skew", "iid", "dirichlet", "shards", "mixture", "given"))
    """How images are divided among users: "skew" (the paper's R), "iid", "dirichlet", "shards" (n classes per
    user) or "mixture"; "given" if the data say who owns which image (ssfl.Data, or sub-folders of
    unlabelled/)."""
    users: int = setting(10, least=1, most=10_000_000, what="users")
    """K, the number of users. If the data say who owns which image, it is the number of owners."""
    skew: float = setting(0.4, least=0, most=1, what="0 is iid, 1 is one main class each")
    """R, the non-iidness: 0 is iid, 1 is one main class each (scheme "skew")."""
    server_labels: int | None = setting(None, least=0, most=10**9, what="images")
    """N_s, the number of labelled images at the server, the same for every class. Default: at most 100 per
    class, or all labelled images if there are also unlabelled ones."""
    labels_at: str = setting("server", choices=("server", "users", "both"))
    """Who holds labels: "server", "users" or "both"."""
    user_labels: int | None = setting(None, least=0, most=10**9, what="images")
    """The number of labelled images of all users together, if users have labels. Default: as
    server_labels."""
    shared: bool = False
    """Give every user the server's images in addition to its own, as DataSharing does."""
    alpha: float = setting(0.1, least=1e-6, most=1e6, what="small is skewed, large is even")
    """The concentration of the Dirichlet distribution (scheme "dirichlet")."""
    capped: bool = False
    """With scheme "dirichlet", a user that has its fair share of the images gets none of the classes that
    follow, as in SemiFL's code. The users' numbers of images then differ less."""
    classes_per_user: int = setting(2, least=1, most=10**6, what="classes")
    """The number of classes of each user (scheme "shards")."""
    mixtures: tuple[tuple[float, ...], ...] = setting((), least=0, most=1e9, what="weights")
    """Rows of class weights (scheme "mixture"). User u takes row u modulo the number of rows."""
    seed: int = setting(2019, least=0, most=2**63 - 1, what="any whole number")
    """The random seed of the split; 2019 is the paper's."""


@dataclass(frozen=True)
class ModelSettings:
    """[model] The network."""

    name: str | None = setting(
        None, choices=("small", "cnn", "resnet9", "resnet18", "vgg11", "wide_resnet", "lite0"), paths=True
    )
    """small, cnn, resnet9, resnet18, vgg11 or wide_resnet; lite0, which starts from ImageNet weights (extra
    "pretrained"); or a function that makes any nn.Module: "FILE.py:name" or "package.module:name". Default:
    what suits the image size; without a GPU one that a CPU can train."""
    train: str = setting("head", choices=("head", "last", "all"))
    """What is trained of lite0: the "head" (the last layer), the "last" block, the last convolution and the
    head, or "all". The rest is frozen and never sent."""
    weights: str | None = None
    """Start from the weights in this .safetensors file. Default: random ones, and ImageNet's for lite0."""
    cached_views: int | None = setting(None, least=0, most=64, what="views; 0 makes new ones in every step")
    """V: if the first part of the network is frozen, compute its output once for V weak and V strong views of
    every image, and train on those. Default: 4 for lite0, unless all of it is trained."""
    norm: str = setting("group", choices=("group", "batch", "none"))
    """Normalisation: "group", "batch" or "none"."""
    norm_statistics: str = setting("average", choices=("average", "server", "recompute"))
    """With batch normalisation, the averaged model's running statistics: "average" (of users and
    server, like the weights), "server" (the server's own, as in the authors' code) or "recompute"
    (anew on the server's images before each evaluation)."""


@dataclass(frozen=True)
class FederationSettings:
    """[federation] The rounds, the users that take part in them, and how their models are averaged."""

    participants: int | None = setting(None, least=1, most=10_000_000, what="users per round")
    """C, the number of users per round. Default: all users."""
    groups: int | None = setting(None, least=1, most=10_000_000, what="groups")
    """S, the number of groups, each with a model of its own. Default: for grouping max(2, C/10 rounded up),
    else 1."""
    group_sizes: str = setting("even", choices=("even", "filled"))
    """Make groups as "even" as possible, or "filled" one after another with C/S users rounded up, as in the
    authors' code (47 users in 5 groups: 10, 10, 10, 10, 7)."""
    period: int = setting(16, least=1, most=10**6, what="local steps")
    """T, the number of local steps per round."""
    local_epochs: float | None = setting(None, least=0.001, most=1000, what="passes over a user's images")
    """Local epochs: users make this many passes over their own images per round, instead of T steps. A user
    with more images takes more steps. The learning rate is then constant within a round."""
    rounds: int | None = setting(None, least=1, most=10**9, what="rounds", instead="epochs")
    """The number of rounds; set this or epochs."""
    epochs: int | None = setting(None, least=1, most=10**6, what="epochs", instead="rounds")
    """E, the length of the run in epochs of epoch_images images per user; set this or rounds."""
    epoch_images: int = setting(65536, least=1, most=10**12, what="images")
    """M, the number of images that each user and the server see in an epoch."""
    extra_step: bool = False
    """Take one more step in the first round of every epoch, as in the authors' code."""
    attackers: float = setting(0.0, least=0, most=1, what="a share of the users")
    """The share of users that send manipulated models, to test how robust a federation is."""
    attack: str = setting("sign", choices=("sign", "ascent", "noise", "shift", "slow", "alternating"))
    """What attackers send: their update with the opposite "sign", the same but very long ("ascent"), random
    "noise", a model whose classes are "shift"ed by one, or "slow" steps towards such a model. "alternating":
    an honest update and one with the opposite sign, in turns."""
    attack_scale: float = setting(1.0, least=0, most=1e6, what="times the update")
    """The factor by which attackers scale their update."""
    head_start: float = setting(0.0, least=0, most=0.9, what="a share of the rounds")
    """The share of the rounds, at the start, in which only the server trains."""
    slow_average: float = setting(0.0, least=0, most=0.99999, what="below 1")
    """Evaluate and save an exponential moving average of the model over rounds, with this decay. 0: the model
    itself."""
    gate: bool | None = None
    """Check every update before it is averaged: cut it if it is longer than usual, lower its weight if the
    user's updates work against the server's labels, and refuse it if it is far too long or not finite. A user
    that is refused three times is excluded. Default: only with real sites."""
    combine: str = setting("mean", choices=("mean", "trimmed", "median"))
    """How the models of a group are averaged: by their "mean" (the paper), or robustly, coordinate by
    coordinate, by a "trimmed" mean or the "median"."""
    median_fallback: bool = False
    """Use the median of a group's models instead of their average if the median has a smaller loss on the
    server's labelled images."""
    skip_unlabelled: bool = False
    """Leave users without any pseudo-label in a round out of its average. Otherwise their models, which
    changed at most by weight decay, count like the others."""
    dropout: float = setting(0.0, least=0, most=0.999, what="a probability below 1")
    """The probability that a participant drops out of a round; the average is over the others."""


@dataclass(frozen=True)
class PrivacySettings:
    """[privacy] Differential privacy for each user. Default: off."""

    clip: float | None = setting(None, least=1e-6, most=1e6, what="a norm")
    """The largest norm of a user's update; a longer one is clipped to it."""
    noise: float | None = setting(None, least=1e-3, most=1e6, what="times clip")
    """z: each user adds Gaussian noise with standard deviation z times clip to every number of its update."""
    delta: float | None = setting(None, least=1e-30, most=0.1, what="a small probability")
    """δ, for which ε is reported. Default: 1e-5, or 1/(10 K) if that is smaller."""


@dataclass(frozen=True)
class TrainSettings:
    """[train] Training at the users and at the server."""

    batch_size: int = setting(64, least=1, most=65536, what="images")
    """B, the number of images per step."""
    lr: float = setting(0.03, least=0, most=1000, what="a learning rate")
    """γ, the base learning rate."""
    momentum: float = setting(0.9, least=0, most=0.9999, what="below 1")
    """SGD's momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    weight_decay: float = setting(1e-4, least=0, most=10, what="a small number")
    """Weight decay on every parameter."""
    clip: float = setting(0.0, least=0, most=1e6, what="a norm; 0 is no limit")
    """Gradient clipping: the largest norm of a step's gradient. 0: no limit."""
    warmup: int = setting(0, least=0, most=10**9, what="steps")
    """The number of steps in which the learning rate rises linearly from 0 (the paper's e epochs are e · M /
    B steps)."""
    cycles: float = setting(7 / 16, least=0, most=1000, what="half turns of the cosine")
    """c, the number of half periods of the cosine in the learning rate schedule; above 1/2 it reaches the
    floor."""
    horizon: float = setting(1.0, least=0.01, most=10_000, what="runs")
    """The length of the learning rate schedule as a multiple of the run's length; above 1 only the beginning
    of the schedule is used."""
    schedule: str = setting("paper", choices=("paper", "annealing"))
    """The learning rate schedule: the "paper"'s, cos(π · cycles · progress), or "annealing", (1 + cos(π ·
    progress)) / 2, as PyTorch's CosineAnnealingLR, which does not use cycles."""
    floor: float = setting(1e-4, least=0, most=1, what="a fraction of train.lr")
    """ε, the smallest learning rate as a fraction of lr."""
    momentum_policy: str = setting("reset", choices=("reset", "server", "slot", "user"))
    """SGD's momentum at the start of a round: "reset" to zero, kept from the last round for the "server"
    only, or kept for server and users: for each "user", or for each "slot". Slots are places in a random
    order of the round's participants, and a participant continues with the momentum of its slot."""
    server_views: str = setting("weak", choices=("weak", "both", "suited"))
    """Views of the server's images: "weak" (paper), "both" (every second image strong), or "suited": both,
    but only weak ones for images of fewer than 16 pixels a side, which strong augmentation would destroy."""
    server_held_out: float = setting(0.0, least=0, most=0.5, what="a part of the server's labelled images")
    """The part of the server's labelled images that it does not train on. The guard of the method `anchored`
    and federation.median_fallback then evaluate models on these images, which the server has not
    memorised."""
    server_batch_size: int | None = setting(None, least=1, most=65536, what="images")
    """The server's number of images per step. Default: batch_size."""
    server_steps: int | None = setting(None, least=1, most=10**6, what="steps")
    """The server's steps per round; its learning rate is then constant within a round. Default: as many as
    the users' (federation.period)."""
    server_lr: float | None = setting(None, least=0, most=1000, what="a learning rate")
    """The server's base learning rate. Default: lr."""
    batches: str = setting("continue", choices=("continue", "restart"))
    """Whether the order of a user's images continues from the last round ("continue") or starts again in
    every round ("restart")."""
    precision: str | None = setting(None, choices=("bfloat16", "float32", "float64"))
    """The number type that networks compute in: "bfloat16", "float32" or "float64". Default: "bfloat16" on a
    GPU, else "float32". Weights, sums, losses and statistics always have at least float32."""


@dataclass(frozen=True)
class RunSettings:
    """[run] How the run is carried out. Except for the seed, these settings do not change the result, apart
    from rounding errors between engines, devices or numbers of threads."""

    seed: int = setting(1, least=0, most=2**63 - 1, what="any whole number")
    """The random seed of the initial weights and of the training; 1 is the paper's."""
    engine: str = setting("auto", choices=("auto", "loop", "vmap", "dist", "sites"))
    """"loop" (one user after another), "vmap" (all at once), "auto", or "dist" (users spread over the
    processes of torchrun). "sites" means that the users are real sites; only `ssfl serve` sets it."""
    users_at_once: int | None = setting(None, least=1, most=10_000_000, what="users")
    """How many users are trained together. Default: as many participants as fit into memory."""
    compile: bool | None = None
    """Compile the steps of "vmap" on a GPU, which takes a while. Default: only for long runs."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1", ..."""
    threads: int | None = setting(None, least=1, most=4096, what="threads")
    """CPU cores to use; on a CPU, users are trained in as many processes of one thread each. Default: all
    cores."""
    eval_every: int | None = setting(None, least=1, most=10**9, what="rounds")
    """Rounds between evaluations; the last round is always evaluated. Default: 1/100 of all rounds, but at
    least 5; with real sites 1."""
    test: str = setting("every", choices=("every", "last", "never"))
    """Which evaluations use the test images: "every" one, only the "last" one (as in a contest), or "never"
    (to choose settings). The others use the validation images (data.validation)."""
    checkpoint_every: int | None = setting(None, least=1, most=10**9, what="rounds")
    """Rounds between checkpoints; there is also one after every two minutes. Default: 1/100 of all rounds,
    but at least 10; with real sites 1."""
    baseline: bool | None = None
    """Also train a model on the server's labels alone, with the same start and as many steps, and say whether
    the unlabelled images helped. If they hurt on held-out labels, the server-only model is kept. Default: yes
    for your own images, no for known data sets."""
    folds: int = setting(0, least=0, most=100, what="folds; 0 is none")
    """Cross-validate on the server's labelled images: each is held out in one of this many shorter runs.
    Images of one patient stay together where file names or sub-folders show it. The final model uses all
    labels."""
    diversity_every: int = setting(0, least=0, most=10**9, what="rounds; 0 is never")
    """Rounds between measurements of gradient diversity; 0 is never."""
    track: str = setting("none", choices=("none", "tensorboard", "mlflow", "wandb"))
    """Also log metrics to "tensorboard" (event files in RUN/tensorboard), "mlflow" or "wandb" (with their own
    clients and configuration)."""


@dataclass(frozen=True)
class Config:
    """All settings of an experiment, section by section."""

    data: DataSettings = field(default_factory=DataSettings)
    split: SplitSettings = field(default_factory=SplitSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    method: "Method" = field(default_factory=lambda: methods.find(methods.DEFAULT)())
    federation: FederationSettings = field(default_factory=FederationSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    run: RunSettings = field(default_factory=RunSettings)


SECTIONS: dict[str, type] = {
    "data": DataSettings, "split": SplitSettings, "model": ModelSettings, "federation": FederationSettings,
    "privacy": PrivacySettings, "train": TrainSettings, "run": RunSettings,
}  # fmt: skip
"""The sections with their dataclasses, except [method], whose settings depend on the method."""
NAMES = ("data", "split", "model", "method", "federation", "privacy", "train", "run")
"""The names of all sections, in the order in which a config file has them."""
