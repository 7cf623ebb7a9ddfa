"""Every setting of a config, as a field of a frozen dataclass. The string below each field describes the
setting.

The default None means that the setting is not used, or that its value depends on the data, the device or
other settings. A value that depends on the data is filled in when a run starts, and the run's config file
shows it. `loading.py` makes checked configs. The section [method] holds the name of a method and that
method's settings, which are defined in `methods/`. "The paper" is Zhang et al. 2020, arXiv 2008.11364.
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
    """A known data set: digits, cifar10, svhn, emnist or stl10. Or FILE.py:NAME or package.module:NAME, a
    function that returns an ssfl.Data. The value "in memory" means that the images were passed from
    Python."""
    path: str | None = setting(None, instead="name")
    """The path of your own images, instead of data.name: an .npz file (x_train, y_train, x_test, y_test) or
    an image folder."""
    root: str = "data"
    """The folder that holds the official files of the known data sets."""
    download: bool = False
    """Whether missing official files may be downloaded."""
    size: int | None = setting(None, least=4, most=1024, what="pixels")
    """Resize all images to squares with sides of this many pixels. Default: images are not resized."""
    test_fraction: float = setting(0.2, least=0.01, most=0.9, what="a fraction of the labelled images")
    """If an image folder has no sub-folder test/, this part of its labelled images is held out for testing.
    Images of one patient, and identical files, stay together. With run.folds, no test images are held out,
    because the cross-validation tests on every labelled image."""
    validation: float = setting(0.0, least=0, most=0.5, what="a fraction of the training images")
    """The part of the labelled training images that is set aside as validation images, before the split.
    Nobody trains on them; they are used to choose settings. In a folder of images, images of one patient, and
    identical files, stay together."""
    flip: bool | None = None
    """Whether augmentation may mirror an image left to right. Default: no for digits, svhn and emnist, and no
    if most of your own images are grey; otherwise yes."""
    views: str = setting("standard", choices=("standard", "gentle", "semifl"))
    """The augmentation. "standard" (paper): weak views are shifted; strong views also go through random
    operations and Cutout. "gentle", for pretrained networks: weak and strong views are made alike, by slight
    rotation, zoom, shift and slight changes of brightness and contrast. "semifl": strong views as SemiFL's
    authors make them. All kinds of augmentation also mirror images if data.flip allows it."""
    test_views: int = setting(0, least=0, most=64, what="views of an image besides the image itself")
    """Test-time augmentation: average the prediction for an image over the image itself and this many views
    of it. It applies to evaluations and to `ssfl predict`. The views are made as for data.views = "gentle".
    Each view costs one more prediction per image. The preset pictures uses 8."""
    broken: str = setting("skip", choices=("skip", "stop"))
    """What to do about image files that cannot be read: "skip" leaves them out with a warning, "stop" ends
    the command with an error. Either message names the files."""


@dataclass(frozen=True)
class SplitSettings:
    """[split] How the images are divided among the server and the users."""

    scheme: str = setting("skew", choices=("skew", "iid", "dirichlet", "shards", "mixture", "given"))
    """How images are divided among users: "skew" (the paper's R), "iid", "dirichlet", "shards" (a fixed
    number of classes per user) or "mixture" (class weights for each user). "given" means that the data say
    who owns which image (ssfl.Data, or sub-folders of unlabelled/)."""
    users: int = setting(10, least=1, most=10_000_000, what="users")
    """K, the number of users. If the data say who owns which image, it is the number of owners."""
    skew: float = setting(0.4, least=0, most=1, what="0 is iid, with 1 each user has one main class")
    """R, how much the users' class mixtures differ (scheme "skew"): 0 is iid, 1 is one main class for each
    user."""
    server_labels: int | None = setting(None, least=0, most=10**9, what="images")
    """N_s, the number of labelled images at the server, equally many of each class. Default: at most 100 per
    class, or all labelled images if the data also have unlabelled ones."""
    labels_at: str = setting("server", choices=("server", "users", "both"))
    """Who has labelled images: only the "server", only the "users", or "both"."""
    user_labels: int | None = setting(None, least=0, most=10**9, what="images")
    """The number of labelled images of all users together, if users have labels. Default: the value of
    server_labels."""
    shared: bool = False
    """Give every user a copy of the server's images in addition to its own, as the method DataSharing
    does."""
    alpha: float = setting(
        0.1, least=1e-6, most=1e6, what="a small value is very skewed, a large value is even"
    )
    """The parameter α of the Dirichlet distribution (scheme "dirichlet"). With a small value, each user has
    few classes. With a large value, all users have about the same mixture."""
    capped: bool = False
    """With scheme "dirichlet", classes are divided one after another. With capped = true, a user that already
    has its fair share of all images gets none of the remaining classes, as in SemiFL's code. The users'
    numbers of images then differ less."""
    classes_per_user: int = setting(2, least=1, most=10**6, what="classes")
    """The number of classes of each user (scheme "shards")."""
    mixtures: tuple[tuple[float, ...], ...] = setting((), least=0, most=1e9, what="class weights")
    """Rows of class weights, one weight for each class (scheme "mixture"). User u takes row u modulo the
    number of rows."""
    seed: int = setting(2019, least=0, most=2**63 - 1, what="a whole number")
    """The random seed of the split; 2019 is the paper's."""


@dataclass(frozen=True)
class ModelSettings:
    """[model] The network: which one it is, its initial weights, and which of its layers are trained."""

    name: str | None = setting(
        None,
        choices=(
            "small", "cnn", "resnet9", "resnet18", "vgg11", "wide_resnet", "wide_resnet_relu", "lite0",
        ),
        paths=True,
    )  # fmt: skip
    """The network: small, cnn, resnet9, resnet18, vgg11 or wide_resnet. Or wide_resnet_relu, which is
    wide_resnet with ReLU and other initial weights, as SemiFL's authors use it. Or lite0, which starts from
    ImageNet weights (extra "pretrained"). Or a function that makes any nn.Module: "FILE.py:name" or
    "package.module:name". Default: one that suits the image size and, without a GPU, can be trained on a
    CPU."""
    train: str = setting("head", choices=("head", "last", "all"))
    """Which layers of lite0 are trained: "head" (only the last layer), "last" (the last block, the last
    convolution and the head) or "all". The other layers are frozen and never sent."""
    weights: str | None = None
    """Start from the weights in this .safetensors file. Default: random weights, or ImageNet weights for
    lite0."""
    cached_views: int | None = setting(
        None, least=0, most=64, what="views; with 0, every step makes new views"
    )
    """V, the number of stored views of each image, for networks whose first layers are frozen. The outputs of
    the frozen layers are computed once, for V weak and V strong views, and training uses these stored
    outputs. With 0, nothing is stored, and every step makes new views. Default: 4 for lite0 unless all its
    layers are trained, otherwise 0."""
    norm: str = setting("group", choices=("group", "batch", "none"))
    """The normalisation layers of the network: "group", "batch" or "none"."""
    norm_statistics: str = setting("average", choices=("average", "server", "recompute", "everyone"))
    """With batch normalisation, where the averaged model's running statistics come from. "average": the mean
    over users and server, as for the weights. "server": those of the server's model, as in the authors' code.
    "recompute": computed on the server's images before each evaluation. "everyone": computed on the images of
    the server and of all users, before each round and evaluation (SemiFL as published, only in
    simulations)."""


@dataclass(frozen=True)
class FederationSettings:
    """[federation] The rounds, the users that take part in them, and how their models are averaged."""

    participants: int | None = setting(None, least=1, most=10_000_000, what="users per round")
    """C, the number of users that take part in a round. Default: all users."""
    groups: int | None = setting(None, least=1, most=10_000_000, what="groups")
    """S, the number of groups of participants; each group has its own model. Default: 1. For the method
    grouping, the default is a tenth of the participants, rounded up, but at least 2."""
    group_sizes: str = setting("even", choices=("even", "filled"))
    """How participants are divided into groups. "even": sizes differ by at most one. "filled", as in the
    authors' code: groups are filled one after another. A full group has C/S users, rounded up, for C
    participants in S groups. For example, 47 users in 5 groups give 10, 10, 10, 10 and 7."""
    period: int = setting(16, least=1, most=10**6, what="local steps")
    """T, the number of training steps of a user in a round."""
    local_epochs: float | None = setting(None, least=0.001, most=1000, what="passes over a user's images")
    """Local epochs: in each round, users make this many passes over their own images, instead of
    federation.period steps. A user with more images takes more steps. If local epochs are set, the learning
    rate is constant within a round."""
    rounds: int | None = setting(None, least=1, most=10**9, what="rounds", instead="epochs")
    """The number of rounds; set this or epochs."""
    epochs: int | None = setting(None, least=1, most=10**6, what="epochs", instead="rounds")
    """E, the length of the run in epochs. An epoch has as many rounds as one user needs to train on
    epoch_images images. Set this or rounds."""
    epoch_images: int = setting(65536, least=1, most=10**12, what="images")
    """M, the length of an epoch in images. A user that takes part in all rounds of an epoch trains on this
    many images."""
    extra_step: bool = False
    """In the first round of every epoch, train for one more step, as in the authors' code."""
    attackers: float = setting(0.0, least=0, most=1, what="a fraction of the users")
    """The share of simulated users that send manipulated models, to test how robust a federation is."""
    attack: str = setting("sign", choices=("sign", "ascent", "noise", "shift", "slow", "alternating"))
    """What attackers send. "sign": their update with the opposite sign. "ascent": the same, but very long.
    "noise": their model plus random noise. "shift": a model that predicts, for each class, the next one.
    "slow": small steps towards such a model. "alternating": an honest update and one with the opposite sign,
    in turns."""
    attack_scale: float = setting(1.0, least=0, most=1e6, what="a factor for the update")
    """The factor by which attackers multiply their manipulated update."""
    head_start: float = setting(0.0, least=0, most=0.9, what="a fraction of the rounds")
    """The share of all rounds, at the start of the run, in which only the server trains."""
    slow_average: float = setting(0.0, least=0, most=0.99999, what="the decay of the average")
    """Evaluate and save an exponential moving average of the model over rounds, with this decay. 0: evaluate
    and save the model itself."""
    gate: bool | None = None
    """Check every user's update before it is averaged. Shorten it if it, or its part in one tensor, is longer
    than usual. Lower its weight if the user's updates work against the server's labels. Refuse it if it is
    far too long or not finite; a user that is refused three times is excluded. Default: only with real
    sites."""
    combine: str = setting("mean", choices=("mean", "trimmed", "median"))
    """How the models of a group are averaged: by their "mean" (the paper), or robustly by a "trimmed" mean or
    the "median" of each weight."""
    median_fallback: bool = False
    """Use the median of a group's models instead of their average if the median has a smaller loss on the
    server's labelled images."""
    skip_unlabelled: bool = False
    """Leave users that have no pseudo-label in a round out of that round's average. Otherwise their models,
    which changed at most by weight decay, are averaged like the others."""
    dropout: float = setting(0.0, least=0, most=0.999, what="a probability below 1")
    """The probability that a participant drops out of a round. The average is then over the remaining
    participants."""


@dataclass(frozen=True)
class PrivacySettings:
    """[privacy] Differential privacy for each user. Default: off."""

    clip: float | None = setting(None, least=1e-6, most=1e6, what="the largest norm of an update")
    """The largest norm of a user's update. A longer update is scaled down to this norm."""
    noise: float | None = setting(None, least=1e-3, most=1e6, what="a multiple of privacy.clip")
    """z: each user adds Gaussian noise to every number of its update. The standard deviation of the noise is
    z times clip."""
    delta: float | None = setting(None, least=1e-30, most=0.1, what="a small probability")
    """The δ of (ε, δ)-differential privacy; ε is reported for this δ. Default: 1e-5, or 1/(10 K) for K users
    if that is smaller."""


@dataclass(frozen=True)
class TrainSettings:
    """[train] How users and the server train: batches, learning rate, momentum and precision."""

    batch_size: int = setting(64, least=1, most=65536, what="images")
    """B, the number of images in a training step."""
    lr: float = setting(0.03, least=0, most=1000, what="a learning rate")
    """γ, the base learning rate."""
    momentum: float = setting(0.9, least=0, most=0.9999, what="a momentum")
    """SGD's momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    weight_decay: float = setting(1e-4, least=0, most=10, what="a weight decay")
    """Weight decay on every parameter."""
    clip: float = setting(0.0, least=0, most=1e6, what="the largest norm of a gradient; 0 means no limit")
    """Gradient clipping: the largest norm of the gradient in a training step. 0: no limit."""
    warmup: int = setting(0, least=0, most=10**9, what="steps")
    """The number of steps in which the learning rate rises linearly from 0. The paper gives it in epochs:
    e epochs are e · federation.epoch_images / train.batch_size steps."""
    cycles: float = setting(7 / 16, least=0, most=1000, what="half periods of the cosine")
    """c, the number of half periods of the cosine that the learning rate schedule covers. With c of at least
    1/2, the learning rate falls to its floor."""
    horizon: float = setting(1.0, least=0.01, most=10_000, what="a multiple of the run's length")
    """The length of the learning rate schedule as a multiple of the run's length. Above 1, the run ends
    before the schedule does."""
    schedule: str = setting("paper", choices=("paper", "annealing"))
    """The learning rate schedule. "paper": cos(π · cycles · progress). "annealing": (1 + cos(π · progress)) /
    2, as in PyTorch's CosineAnnealingLR; it does not use cycles."""
    floor: float = setting(1e-4, least=0, most=1, what="a fraction of train.lr")
    """ε, the smallest learning rate as a fraction of lr."""
    momentum_policy: str = setting("reset", choices=("reset", "server", "slot", "user"))
    """SGD's momentum at the start of a round. "reset": it is zero. "server": only the server keeps its
    momentum from the last round. "user": the server and every user keep theirs. "slot": as "user", but for
    positions instead of users. Each round puts its participants into a random order. The participant at
    position i continues with the momentum of the last participant that had position i."""
    server_views: str = setting("weak", choices=("weak", "both", "suited"))
    """Views of the server's images: "weak" (paper), "both" (every second image is a strong view), or
    "suited". "suited" means "both" for images of at least 16 pixels a side, and "weak" for smaller images,
    which strong augmentation would destroy."""
    server_held_out: float = setting(
        0.0, least=0, most=0.5, what="a fraction of the server's labelled images"
    )
    """The part of the server's labelled images that the server does not train on. In a folder of images,
    images of one patient, and identical files, stay together. The held-out images serve to evaluate models
    and updates, because the server cannot have memorised them. They are used by the settings guard and
    relative of the method `anchored`, by federation.median_fallback and by federation.gate."""
    server_batch_size: int | None = setting(None, least=1, most=65536, what="images")
    """The number of images in a training step of the server. Default: batch_size."""
    server_steps: int | None = setting(None, least=1, most=10**6, what="steps")
    """The number of the server's training steps in a round. If it is set, the server's learning rate is
    constant within a round. Default: federation.period."""
    server_lr: float | None = setting(None, least=0, most=1000, what="a learning rate")
    """The server's base learning rate. Default: lr."""
    batches: str = setting("continue", choices=("continue", "restart"))
    """In which order a user's images are used in a round: "continue" goes on where the last round ended,
    "restart" begins a new random order."""
    precision: str | None = setting(None, choices=("bfloat16", "float32", "float64"))
    """The number type in which networks compute: "bfloat16", "float32" or "float64". Default: "bfloat16" on a
    GPU, otherwise "float32". Weights, sums, losses and statistics always have at least float32."""

    def batch_of(self, role: str) -> int:
        """Returns the number of images in a training step, for the role "user" or "server"."""
        return self.batch_size if role == "user" else self.server_batch_size or self.batch_size


@dataclass(frozen=True)
class RunSettings:
    """[run] How the run is carried out and evaluated. Only seed, baseline and folds can change the final
    model. The other settings change it at most by rounding errors, if model.name and train.precision are set;
    the defaults of these two depend on the device."""

    seed: int = setting(1, least=0, most=2**63 - 1, what="a whole number")
    """The random seed of the initial weights and of the training; 1 is the paper's."""
    engine: str = setting("auto", choices=("auto", "loop", "vmap", "dist", "sites"))
    """How users are trained. "loop": one after another. "vmap": many at once. "auto": chosen automatically.
    "dist": users are divided among the processes of torchrun. "sites": the users are real sites; only `ssfl
    serve` sets this."""
    users_at_once: int | None = setting(None, least=1, most=10_000_000, what="users")
    """How many users are trained at the same time. Default: as many participants as fit into memory."""
    compile: bool | None = None
    """Whether to compile the training steps of the engine "vmap" on a GPU, which takes a while. Networks that
    consist of ssfl's GPU kernels are not compiled. Default: only for long runs."""
    device: str = "auto"
    """The device that trains: "auto", "cpu", "cuda", "cuda:1" and so on. "auto" is the GPU if there is
    one."""
    threads: int | None = setting(None, least=1, most=4096, what="threads")
    """The number of CPU cores to use. On a CPU, users are trained in as many processes, with one thread each.
    Default: all cores."""
    eval_every: int | None = setting(None, least=1, most=10**9, what="rounds")
    """The number of rounds from one evaluation to the next; the last round is always evaluated. Default:
    1/100 of all rounds, but at least 5; with real sites 1."""
    test: str = setting("every", choices=("every", "last", "never"))
    """Which evaluations use the test images: "every" one, only the "last" one (as in a contest), or "never"
    (to choose settings). Validation images (data.validation), if there are any, are used in every
    evaluation."""
    checkpoint_every: int | None = setting(None, least=1, most=10**9, what="rounds")
    """The number of rounds from one checkpoint to the next; a checkpoint is also written every two minutes.
    Default: 1/100 of all rounds, but at least 10; with real sites 1."""
    baseline: bool | None = None
    """Also train a model on the server's labels alone, with the same initial weights and number of steps, and
    report whether the unlabelled images helped. If they hurt on held-out labels, the server-only model is
    kept as the result. Default: yes for your own images, no for known data sets."""
    folds: int = setting(0, least=0, most=100, what="folds; 0 means no cross-validation")
    """The number of folds of a cross-validation on the server's labelled images; 0 is none. Each image is
    held out in one of this many shorter runs. If file names or sub-folders show which images belong to the
    same patient, these images stay in the same fold, and so do identical files. The final model is trained on
    all labels."""
    diversity_every: int = setting(0, least=0, most=10**9, what="a number of rounds; 0 means never")
    """The number of rounds from one measurement of gradient diversity to the next; 0 is never."""
    track: str = setting("none", choices=("none", "tensorboard", "mlflow", "wandb"))
    """Also log metrics to an experiment tracker: "tensorboard" (event files in RUN/tensorboard), "mlflow" or
    "wandb". The last two use their own clients and their own configuration."""


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
    explicit: frozenset[str] | None = field(default=None, compare=False, repr=False)
    """The settings that the config's source and overrides contain, as "section.key". All others have
    defaults, some of which depend on the method. None: not known."""


SECTIONS: dict[str, type] = {
    "data": DataSettings, "split": SplitSettings, "model": ModelSettings, "federation": FederationSettings,
    "privacy": PrivacySettings, "train": TrainSettings, "run": RunSettings,
}  # fmt: skip
"""The dataclass of each section of a config. [method] is missing, because its settings depend on the
method."""
NAMES = ("data", "split", "model", "method", "federation", "privacy", "train", "run")
"""The names of all sections, in the order of a config file."""
