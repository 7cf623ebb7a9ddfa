"""Every setting: frozen dataclasses, a docstring under each field.

A setting that is None is chosen when the data are known; the resolved config of a run shows what it
became. `loading.py` reads and writes them. [method] holds the name of a method and that method's own fields,
see `methods/`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ssfl import methods
from ssfl.core.fields import setting

if TYPE_CHECKING:
    from ssfl.federation import Method


@dataclass(frozen=True)
class DataSettings:
    """[data] Which images."""

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
    """Whether missing official files may be fetched."""
    size: int | None = setting(None, least=4, most=1024, what="pixels")
    """Resize all images to this many pixels square."""
    test_fraction: float = setting(0.2, least=0.01, most=0.9, what="a part of the labelled images")
    """The part of a folder's labelled images held out for testing where it has no test/ of its own. With
    run.folds nothing is: each labelled image is tested in its fold."""
    validation: float = setting(0.0, least=0, most=0.5, what="a part of the training images")
    """The part of the training images set aside before the split, to choose settings by."""
    flip: bool | None = None
    """Whether views may be mirrored. Default: yes, but no for digits and letters and where most images are
    grey by their pixel values."""
    broken: str = setting("skip", choices=("skip", "stop"))
    """What to do about image files that cannot be read: "skip" leaves them out with a warning, "stop" ends
    the command. Both name them together."""


@dataclass(frozen=True)
class SplitSettings:
    """[split] Who gets which images."""

    scheme: str = setting("skew", choices=("skew", "iid", "dirichlet", "shards", "mixture", "given"))
    """"skew" (the paper's R), "iid", "dirichlet", "shards" (n classes per user) or "mixture"; "given" if the
    data say who owns which image (ssfl.Data, or sub-folders of unlabelled/)."""
    users: int = setting(10, least=1, most=10_000_000, what="users")
    """K, the number of users; if the data say who owns which image, the number of their owners."""
    skew: float = setting(0.4, least=0, most=1, what="0 is iid, 1 is one main class each")
    """R, the non-iidness: 0 is iid, 1 is one main class each (scheme "skew")."""
    server_labels: int | None = setting(None, least=0, most=10**9, what="images")
    """N_s, labelled images at the server, uniform over classes; by itself at most 100 per class, or
    every labelled image where there are others without labels."""
    labels_at: str = setting("server", choices=("server", "users", "both"))
    """Who holds labels: "server", "users" or "both"."""
    user_labels: int | None = setting(None, least=0, most=10**9, what="images")
    """Labelled images of all users together, where users have labels; by itself as server_labels."""
    shared: bool = False
    """Give the server's images to every user besides its own, as DataSharing does."""
    alpha: float = setting(0.1, least=1e-6, most=1e6, what="small is skewed, large is even")
    """Concentration of scheme "dirichlet"."""
    capped: bool = False
    """With scheme "dirichlet", users that have their fair share of the images already get none of the classes
    that follow, as in SemiFL's code: users' numbers of images then differ less."""
    classes_per_user: int = setting(2, least=1, most=10**6, what="classes")
    """Classes each user holds in scheme "shards"."""
    mixtures: tuple[tuple[float, ...], ...] = setting((), least=0, most=1e9, what="weights")
    """Rows of class weights for scheme "mixture"; user u takes row u mod their number."""
    seed: int = setting(2019, least=0, most=2**63 - 1, what="any whole number")
    """Names the random choices of the split; 2019 is the paper's."""


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
    """[federation] Rounds and who takes part."""

    participants: int | None = setting(None, least=1, most=10_000_000, what="users per round")
    """C, users per round; by itself all of them."""
    groups: int | None = setting(None, least=1, most=10_000_000, what="groups")
    """S, the number of group streams; by itself max(2, C/10 rounded up) for grouping, else 1."""
    group_sizes: str = setting("even", choices=("even", "filled"))
    """Groups as "even" as possible, or "filled" one after another with C/S users rounded up, as in the
    authors' code (47 users in 5 groups: 10, 10, 10, 10, 7)."""
    period: int = setting(16, least=1, most=10**6, what="local steps")
    """T, local steps per round."""
    local_epochs: float | None = setting(None, least=0.001, most=1000, what="passes over a user's images")
    """Users train so many passes over their own images in a round instead of T steps: a user with more images
    takes more steps. The learning rate then stays the same within a round."""
    rounds: int | None = setting(None, least=1, most=10**9, what="rounds", instead="epochs")
    """How many rounds; or give epochs."""
    epochs: int | None = setting(None, least=1, most=10**6, what="epochs", instead="rounds")
    """E, rounds counted in epochs of epoch_images images per trainer."""
    epoch_images: int = setting(65536, least=1, most=10**12, what="images")
    """M, images each trainer sees in an epoch."""
    extra_step: bool = False
    """One step more in the first round of every epoch, as in the authors' code."""
    attackers: float = setting(0.0, least=0, most=1, what="a share of the users")
    """The share of users that send garbage, to see what a federation withstands."""
    attack: str = setting("sign", choices=("sign", "ascent", "noise", "shift", "slow"))
    """What they send: an update of the opposite "sign", such an update that is very long ("ascent"), "noise",
    a model whose classes are "shift"ed, or "slow" steps towards such a model."""
    attack_scale: float = setting(1.0, least=0, most=1e6, what="times the update")
    """How many times as long they make their update."""
    head_start: float = setting(0.0, least=0, most=0.9, what="a share of the rounds")
    """The share of the rounds, the first ones, that the server plays alone before users take part."""
    slow_average: float = setting(0.0, least=0, most=0.99999, what="below 1")
    """Evaluate and save a slow average over rounds; this much of it stays in each. 0: the plain model."""
    gate: bool | None = None
    """Cut updates that are longer than is usual, give users whose updates work against the server's labels
    less weight or none, and refuse models that are not finite or whose update is far too long. A user that is
    refused three times is left out. Default: only with real sites."""
    combine: str = setting("mean", choices=("mean", "trimmed", "median"))
    """How the models of a group become one: their "mean" (the paper), or robustly, coordinate by coordinate,
    a "trimmed" mean or the "median"."""
    check: bool = False
    """Use a group's median instead of its average where it does better on the server's labelled images."""
    skip_unlabelled: bool = False
    """Leave users that had no pseudo-label in a round out of its average; otherwise their models, which did
    not move or only decayed, count like the others."""
    dropout: float = setting(0.0, least=0, most=0.999, what="a probability below 1: somebody must come back")
    """The chance that a participant does not come back; the average is over those who do."""


@dataclass(frozen=True)
class PrivacySettings:
    """[privacy] Differential privacy of each user; off where nothing is set."""

    clip: float | None = setting(None, least=1e-6, most=1e6, what="a length")
    """The most length a user's update may have; a longer one is cut to it."""
    noise: float | None = setting(None, least=1e-3, most=1e6, what="times clip")
    """z: each user adds Gaussian noise of z times clip to every number of its update."""
    delta: float | None = setting(None, least=1e-30, most=0.1, what="a small probability")
    """δ, at which ε is told; by itself 1e-5, or a tenth of 1/K where that is less."""


@dataclass(frozen=True)
class TrainSettings:
    """[train] Local optimisation."""

    batch_size: int = setting(64, least=1, most=65536, what="images")
    """B, images per step."""
    lr: float = setting(0.03, least=0, most=1000, what="a learning rate")
    """γ, the base learning rate."""
    momentum: float = setting(0.9, least=0, most=0.9999, what="below 1")
    """SGD's momentum."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    weight_decay: float = setting(1e-4, least=0, most=10, what="a small number")
    """Weight decay on every parameter."""
    clip: float = setting(0.0, least=0, most=1e6, what="a length; 0 is any")
    """The most length of a step's gradient: a longer one is cut to it; 0 is any."""
    warmup: int = setting(0, least=0, most=10**9, what="steps")
    """Steps of linear warm-up from zero (the paper's e epochs are e · M / B steps)."""
    cycles: float = setting(7 / 16, least=0, most=1000, what="half turns of the cosine")
    """c, how many half turns the cosine makes; above 1/2 it reaches the floor."""
    horizon: float = setting(1.0, least=0.01, most=10_000, what="runs")
    """The schedule's length as a multiple of the run's; above 1 only its beginning is used."""
    schedule: str = setting("paper", choices=("paper", "annealing"))
    """The cosine: the "paper"'s, cos(π · cycles · progress), or "annealing", (1 + cos(π · progress)) / 2, as
    PyTorch's CosineAnnealingLR, to which cycles do not apply."""
    floor: float = setting(1e-4, least=0, most=1, what="a fraction of train.lr")
    """ε, the least fraction of the base rate."""
    momentum_policy: str = setting("reset", choices=("reset", "server", "slot", "user"))
    """Momentum at the start of a round: "reset" to zero, kept by the "server" alone, or kept by server and
    users, for each "slot" of a round or for each "user"."""
    server_views: str = setting("weak", choices=("weak", "both", "suited"))
    """Views of the server's images: "weak" (paper), "both" (every second one strong), or "suited": both,
    but weak alone for images of fewer than 16 pixels a side, of which strong views would leave little."""
    server_held_out: float = setting(0.0, least=0, most=0.5, what="a part of the server's labelled images")
    """The part of the server's labelled images that it does not train on. A method's guard and
    federation.check judge by these instead of by images that it has learned by heart."""
    server_batch_size: int | None = setting(None, least=1, most=65536, what="images")
    """Images per step of the server. Default: batch_size."""
    server_steps: int | None = setting(None, least=1, most=10**6, what="steps")
    """Steps of the server per round, during which its learning rate stays the same. Default: as many as the
    users' (federation.period)."""
    server_lr: float | None = setting(None, least=0, most=1000, what="a learning rate")
    """The server's base learning rate. Default: lr."""
    batches: str = setting("continue", choices=("continue", "restart"))
    """In every round a trainer's order of images goes on ("continue") or begins anew ("restart")."""
    precision: str | None = setting(None, choices=("bfloat16", "float32", "float64"))
    """In which numbers networks compute: "bfloat16", "float32" or "float64"; by itself "bfloat16" on a GPU,
    else "float32". Weights, sums, losses and statistics are kept in float32 (float64) in any case."""


@dataclass(frozen=True)
class RunSettings:
    """[run] How the run is carried out. Apart from the seed, what is computed stays the same, up to the
    last digits that another engine, device or number of threads rounds differently."""

    seed: int = setting(1, least=0, most=2**63 - 1, what="any whole number")
    """Names the initial weights and every draw of the training; 1 is the paper's."""
    engine: str = setting("auto", choices=("auto", "loop", "vmap", "dist", "sites"))
    """"loop" (one user after another), "vmap" (all at once), "auto", or "dist" (users spread over the
    processes of torchrun); "sites" is what `ssfl serve` writes: users are real ones."""
    users_at_once: int | None = setting(None, least=1, most=10_000_000, what="users")
    """How many users are trained together; by itself as many of the participants as memory holds."""
    compile: bool | None = None
    """Compile the steps of "vmap" on a GPU, which takes a while; by itself where the run is long."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1", ..."""
    threads: int | None = setting(None, least=1, most=4096, what="threads")
    """CPU cores to use, by itself all: on a CPU users are trained in so many processes of one thread."""
    eval_every: int | None = setting(None, least=1, most=10**9, what="rounds")
    """Rounds between evaluations, by itself a hundredth of all or 5; the last round is always evaluated."""
    test: str = setting("every", choices=("every", "last", "never"))
    """Which evaluations look at the test images: "every" one, the "last" alone, as in a contest, or "never",
    for runs by which something is chosen; the others look at the validation images (data.validation)."""
    checkpoint_every: int | None = setting(None, least=1, most=10**9, what="rounds")
    """Rounds between checkpoints, by itself a hundredth of all or 10; after two minutes one anyway."""
    baseline: bool | None = None
    """Also train a model on the server's labels alone, with the same start and as many steps, and say whether
    the unlabelled images helped. If they hurt on held-out labels, the server-only model is kept. Default: yes
    for your own images, no for known data sets."""
    folds: int = setting(0, least=0, most=100, what="folds; 0 is none")
    """Cross-validate on the server's labelled images: each is held out in one of so many shorter runs. Images
    of one patient stay together where file names or sub-folders show it. The final model uses all labels."""
    diversity_every: int = setting(0, least=0, most=10**9, what="rounds; 0 is never")
    """Rounds between measurements of gradient diversity; 0 is never."""
    track: str = setting("none", choices=("none", "tensorboard", "mlflow", "wandb"))
    """Who else is told the numbers: "tensorboard" (event files in RUN/tensorboard), "mlflow" or "wandb"
    (through their own clients, configured as they say)."""


@dataclass(frozen=True)
class Config:
    """A whole experiment."""

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
"""The sections whose settings do not depend on the method."""
NAMES = ("data", "split", "model", "method", "federation", "privacy", "train", "run")
"""All sections, in the order of a file."""
