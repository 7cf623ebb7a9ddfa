"""The contestant Flower: its simulation on Ray, with a ClientApp that trains T steps in plain PyTorch and a
ServerApp with FedAvg.

The data and the network stay in each actor's process (a Ray worker) from one message to the next.
"""

import functools
import json
import os
import time
from dataclasses import asdict
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.result import Result
from flwr.simulation import run_simulation

from benchmarks import jobs, peers

client = ClientApp()


@functools.cache
def task_of(text: str) -> peers.Task:
    """Returns the job's data and network. They are loaded once in each actor's process. `text` is the job's
    description as JSON."""
    task = peers.prepare(jobs.Spec(**json.loads(text)))
    torch.set_num_threads(1)  # one CPU for each client
    return task


@client.train()
def train(message: Message, context: Context) -> Message:
    """Trains one user for one round from the model in the message, and returns the trained model as a
    reply."""
    task = task_of(str(message.content.config_records["config"]["spec"]))
    config = task.config.train
    task.network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = task.sgd(task.network.parameters(), config.lr)
    before = task.steps, task.seen, float(task.total)
    images, labels = task.draw(int(context.node_config["partition-id"]))
    for x, y in zip(images.split(config.batch_size), labels.split(config.batch_size), strict=True):
        optimizer.zero_grad()
        task.loss(task.network, x, y).backward()
        optimizer.step()
    metrics: dict[str, Any] = {
        "num-examples": len(images),
        "steps": task.steps - before[0],
        "images": task.seen - before[1],
        "total": float(task.total) - before[2],
        "threads": torch.get_num_threads(),
        "process": os.getpid(),
    }
    content = RecordDict({"arrays": ArrayRecord(task.network.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


def run(spec: jobs.Spec) -> jobs.Measured:
    """Runs the job with Flower and returns the measurements. Round times are taken in the ServerApp's
    evaluate_fn, which Flower calls after each round."""
    measured = jobs.Measured()
    network = peers.prepare(spec).network
    config = jobs.config(spec)
    chosen = jobs.participants(config)
    processes: set[int] = set()
    server = ServerApp()

    def summed(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        metrics: list[dict[str, Any]] = [dict(reply.metric_records["metrics"]) for reply in replies]
        processes.update(one["process"] for one in metrics)
        measured.threads = metrics[0]["threads"]
        return MetricRecord(
            {name: sum(one[name] for one in metrics) for name in ("steps", "images", "total")}
        )

    def note(round: int, arrays: ArrayRecord) -> None:
        measured.ends.append(time.monotonic())

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=chosen / config.split.users, min_train_nodes=chosen, fraction_evaluate=0.0,
            min_available_nodes=config.split.users, train_metrics_aggr_fn=summed,
        )  # fmt: skip
        result: Result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network.state_dict()),
            num_rounds=spec.rounds,
            train_config=ConfigRecord({"spec": json.dumps(asdict(spec))}),
            evaluate_fn=note,
        )
        for record in result.train_metrics_clientapp.values():
            totals: dict[str, Any] = dict(record)
            measured.steps += int(totals["steps"])
            measured.images += int(totals["images"])
            measured.losses.append(float(totals["total"]) / int(totals["steps"]))

    cuda = spec.device.startswith("cuda")
    run_simulation(
        server, client, config.split.users,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.25 if cuda else 0.0}},
    )  # fmt: skip
    measured.ready, *measured.ends = measured.ends  # Flower also calls evaluate_fn before the first round
    measured.processes = len(processes)
    return measured
