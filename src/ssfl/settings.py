"""Every setting: frozen dataclasses, a docstring under each field.

A setting that is None is chosen when the data are known; the resolved config of a run shows what it
became. `config.py` reads and writes them, `limits.py` says what values are allowed.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Data:
    """[data] Which images."""

    name: str | None = None
    """A known data set: digits, cifar10, svhn, emnist, stl10; or FILE.py:NAME or package.module:NAME, a
    function that returns an ssfl.Data. Images that were passed from Python are "in memory"."""
    path: str | None = None
    """Your own images instead: an .npz file (x_train, y_train, x_test, y_test) or an image folder."""
    root: str = "data"
    """The folder that holds the known data sets' official files."""
    download: bool = False
    """Whether missing official files may be fetched."""
    size: int | None = None
    """Resize all images to this many pixels square."""
    test_fraction: float = 0.2
    """The part of a folder's labelled images held out for testing where it has no test/ of its own."""
    validation: float = 0.0
    """The part of the training images set aside before the split, to choose settings by."""
    flip: bool | None = None
    """Whether views may be mirrored; by itself: yes for objects, no for digits and letters."""


@dataclass(frozen=True)
class Split:
    """[split] Who gets which images."""

    scheme: str = "skew"
    """"skew" (the paper's R), "iid", "dirichlet", "shards" (n classes per user) or "mixture"; "given" if the
    data say who owns which image (ssfl.Data, or sub-folders of unlabelled/)."""
    users: int = 10
    """K, the number of users; if the data say who owns which image, the number of their owners."""
    skew: float = 0.4
    """R, the non-iidness: 0 is iid, 1 is one main class each (scheme "skew")."""
    server_labels: int | None = None
    """N_s, labelled images at the server, uniform over classes; by itself at most 100 per class, or
    every labelled image where there are others without labels."""
    labels_at: str = "server"
    """Who holds labels: "server", "users" or "both"."""
    user_labels: int | None = None
    """Labelled images of all users together, where users have labels; by itself as server_labels."""
    shared: bool = False
    """Give the server's images to every user besides its own, as DataSharing does."""
    alpha: float = 0.1
    """Concentration of scheme "dirichlet"."""
    classes_per_user: int = 2
    """Classes each user holds in scheme "shards"."""
    mixtures: tuple[tuple[float, ...], ...] = ()
    """Rows of class weights for scheme "mixture"; user u takes row u mod their number."""
    seed: int = 2019
    """Names the random choices of the split; 2019 is the paper's."""


@dataclass(frozen=True)
class Model:
    """[model] The network."""

    name: str | None = None
    """small, cnn, resnet9, resnet18, vgg11 or wide_resnet; by itself what suits the image size,
    without a GPU one that a CPU can train; the run keeps it."""
    norm: str = "group"
    """Normalisation: "group", "batch" or "none"."""
    norm_statistics: str = "average"
    """With batch normalisation, the averaged model's running statistics: "average" (of users and
    server, like the weights), "server" (the server's own, as in the authors' code) or "recompute"
    (anew on the server's images before each evaluation)."""


@dataclass(frozen=True)
class Method:
    """[method] How users learn and how models are averaged."""

    name: str = "anchored"
    """A row of the methods table: anchored, alternate, grouping, crl-gn, crl-bn, self-training, supervised,
    server-only, fixmatch, data-sharing, easgd, overlap-sgd, fedmatch, semifl, fl2, rscfed, cbafed, fedprox,
    flexmatch, freematch."""
    objective: str = "consistency"
    """The users' loss: "consistency" (CRL), "self-training", "supervised", "fedmatch" or "none"."""
    threshold: float = 0.95
    """τ: a pseudo-label counts when the model is at least this sure."""
    labels: str = "step"
    """When pseudo-labels are made: in every "step", by the model as it is then, or once a "round", by the
    model that was received."""
    thresholds: str = "fixed"
    """How sure each class must be, with labels once a round: "fixed" (τ), "flex" (FlexMatch), "free"
    (FreeMatch; (FL)²'s class-aware threshold) or "balanced" (CBAFed, by what everybody trained on)."""
    fill: bool = False
    """With labels once a round, fill batches with images that have one, as SemiFL does, instead of counting
    the others as zeros; a user without any does not count."""
    mix: float = 0.0
    """With labels once a round, the weight of SemiFL's loss on mixtures of two images."""
    proximal: float = 0.0
    """μ of FedProx: how strongly a user's weights are held to those received."""
    sharpness: float = 0.0
    """ρ of (FL)²: with labels once a round, how far weights are moved uphill to ask for the same answers."""
    server_views: str = "weak"
    """Views of the server's images: "weak" (paper), "both", every second one strong, or "suited": both, but
    weak alone where images have fewer than 16 pixels a side and strong views would leave little of them."""
    averaging: str = "fedavg"
    """"fedavg", "grouping" (federation.groups streams), "weighted" (method.server_weight), or every user
    keeps a model of its own that is drawn to a common one: "elastic" (EASGD) or "overlap" (OverlapSGD)."""
    server: str = "parallel"
    """When the server trains: "parallel" to the users (paper), "alternate" (after the average) or
    "none"."""
    server_weight: float | None = None
    """The server's share in averaging "weighted"."""
    gate: bool | None = None
    """Refuse models that are not finite or whose update is far longer than the others'; who is refused three
    times is left out. By itself with real sites alone."""
    check: bool = False
    """Of a group's average and its median take the one that does better on the server's labelled images."""
    guard: bool = False
    """With a server that trains last: play the round without the users where the server would end less than
    half as far above chance, on its own labelled images, as it ever was."""
    combine: str = "mean"
    """How a group's users become one: "mean" (the paper), or robustly, coordinate by coordinate: "trimmed"
    mean or "median"; or by "distance", as RSCFed: three means of halves, in which outliers weigh less."""
    weighting: str = "even"
    """What users weigh in the mean: "even" (the paper), "doubt" ((FL)²: who is less sure weighs more) or
    "labelled" (CBAFed: by how many images got a pseudo-label)."""
    pace: str = "full"
    """How long users' steps are, with labels once a round: "full"; or by "classes": shorter where a user's
    pseudo-labels are of few classes, and what it learned counts more; not where users hold labels."""
    head_start: float = 0.0
    """The share of the rounds, the first ones, that the server plays alone before users take part."""
    server_momentum: float = 0.0
    """β of the server's momentum: how much of the last round's movement is added to this one's."""
    residual: int = 0
    """CBAFed's residual connection: every so many rounds the model becomes its mean with the one kept the
    last time; 0 is never."""
    slow: float = 0.0
    """Of a slow average over rounds, how much stays in each; above 0 it is what is evaluated and kept."""
    server_replicas: bool = False
    """With grouping and a parallel server, one copy of the server trains for each group, as in the
    authors' code, instead of one for all."""
    elasticity: float | None = None
    """How far models are drawn to each other in averaging "elastic" (by itself 0.9/C) and "overlap" (0.6)."""
    views: str = "separate"
    """Whether weak and strong views pass through the network in "joint" or "separate" batches; with
    batch normalisation they differ."""
    teacher_mode: str = "eval"
    """Pseudo-labels from the network in "eval" or "train" mode; with dropout or batch normalisation
    they differ. Joint views are always in training mode."""


@dataclass(frozen=True)
class Federation:
    """[federation] Rounds and who takes part."""

    participants: int | None = None
    """C, users per round; by itself all of them."""
    groups: int | None = None
    """S, the number of group streams; by itself max(2, C/10 rounded up) for grouping, else 1."""
    group_sizes: str = "even"
    """Groups as "even" as possible, or "filled" one after another with C/S users rounded up, as in the
    authors' code (47 users in 5 groups: 10, 10, 10, 10, 7)."""
    period: int = 16
    """T, local steps per round."""
    rounds: int | None = None
    """How many rounds; or give epochs."""
    epochs: int | None = None
    """E, rounds counted in epochs of epoch_images images per trainer."""
    epoch_images: int = 65536
    """M, images each trainer sees in an epoch."""
    extra_step: bool = False
    """One step more in the first round of every epoch, as in the authors' code."""
    attackers: float = 0.0
    """The share of users that send garbage, to see what a federation withstands."""
    attack: str = "sign"
    """What they send: an update of the opposite "sign", "noise", or a model whose classes are "shift"ed."""
    attack_scale: float = 1.0
    """How many times as long they make their update."""
    dropout: float = 0.0
    """The chance that a participant does not come back; the average is over those who do."""


@dataclass(frozen=True)
class Privacy:
    """[privacy] Differential privacy of each user; off where nothing is set."""

    clip: float | None = None
    """The most length a user's update may have; a longer one is cut to it."""
    noise: float | None = None
    """z: each user adds Gaussian noise of z times clip to every number of its update."""
    delta: float | None = None
    """δ, at which ε is told; by itself 1e-5, or a tenth of 1/K where that is less."""


@dataclass(frozen=True)
class Train:
    """[train] Local optimisation."""

    batch_size: int = 64
    """B, images per step."""
    lr: float = 0.03
    """γ, the base learning rate."""
    momentum: float = 0.9
    """SGD's momentum."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    weight_decay: float = 1e-4
    """Weight decay on every parameter."""
    clip: float = 0.0
    """The most length of a step's gradient: a longer one is cut to it; 0 is any."""
    warmup: int = 0
    """Steps of linear warm-up from zero (the paper's e epochs are e · M / B steps)."""
    cycles: float = 7 / 16
    """c, how many half turns the cosine makes; above 1/2 it reaches the floor."""
    horizon: float = 1.0
    """The schedule's length as a multiple of the run's; above 1 only its beginning is used."""
    floor: float = 1e-4
    """ε, the least fraction of the base rate."""
    momentum_policy: str = "reset"
    """Momentum at the start of a round: "reset" to zero, kept per "slot" or kept per "user"."""
    batches: str = "continue"
    """In every round a trainer's order of images goes on ("continue") or begins anew ("restart")."""
    precision: str | None = None
    """In which numbers networks compute: "bfloat16", "float32" or "float64"; by itself "bfloat16" on a GPU,
    else "float32". Weights, sums, losses and statistics are kept in float32 (float64) in any case."""


@dataclass(frozen=True)
class Run:
    """[run] How the run is carried out. Apart from the seed, what is computed stays the same, up to the
    last digits that another engine, device or number of threads rounds differently."""

    seed: int = 1
    """Names the initial weights and every draw of the training; 1 is the paper's."""
    engine: str = "auto"
    """"loop" (one user after another), "vmap" (all at once), "auto", or "dist" (users spread over the
    processes of torchrun); "sites" is what `ssfl serve` writes: users are real ones."""
    users_at_once: int | None = None
    """How many users are trained together; by itself as many of the participants as memory holds."""
    compile: bool | None = None
    """Compile the steps of "vmap" on a GPU, which takes a while; by itself where the run is long."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1", ..."""
    threads: int | None = None
    """CPU cores to use, by itself all: on a CPU users are trained in so many processes of one thread."""
    eval_every: int | None = None
    """Rounds between evaluations, by itself a hundredth of all or 5; the last round is always evaluated."""
    test: str = "every"
    """Which evaluations look at the test images: "every" one, the "last" alone, as in a contest, or "never",
    for runs by which something is chosen; the others look at the validation images (data.validation)."""
    checkpoint_every: int | None = None
    """Rounds between checkpoints, by itself a hundredth of all or 10; after two minutes one anyway."""
    diversity_every: int = 0
    """Rounds between measurements of gradient diversity; 0 is never."""
    track: str = "none"
    """Who else is told the numbers: "tensorboard" (event files in RUN/tensorboard), "mlflow" or "wandb"
    (through their own clients, configured as they say)."""


@dataclass(frozen=True)
class Config:
    """A whole experiment."""

    data: Data = field(default_factory=Data)
    split: Split = field(default_factory=Split)
    model: Model = field(default_factory=Model)
    method: Method = field(default_factory=Method)
    federation: Federation = field(default_factory=Federation)
    privacy: Privacy = field(default_factory=Privacy)
    train: Train = field(default_factory=Train)
    run: Run = field(default_factory=Run)


SECTIONS: dict[str, type] = {
    "data": Data, "split": Split, "model": Model, "method": Method,
    "federation": Federation, "privacy": Privacy, "train": Train, "run": Run,
}  # fmt: skip
