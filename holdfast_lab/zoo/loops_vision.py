"""Loops that train on images: torchvision's reference, MNIST, diffusion, a GAN, augmentation."""

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Guard, Optimizers, Snapshots, protect
from holdfast_lab.zoo.loop import FaultKind, Form, Loop, draw, draw_tokens

CLASSES = 4

Images = tuple[torch.Tensor, torch.Tensor]


def _dataset(seed: int, count: int = 20, size: int = 8) -> TensorDataset:
    images = draw(count, 1, size, size, seed=seed)
    return TensorDataset(images, draw_tokens(count, below=CLASSES, seed=seed))


class _Residual(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with what the block adds."""
        h = functional.relu(self.norm_1(self.conv_1(x)))
        return functional.relu(x + self.norm_2(self.conv_2(h)))


class Torchvision(Loop):
    """The loop of torchvision's references for classification."""

    name = "torchvision"
    like = "torchvision's reference: batch norm, warm-up, a schedule by epoch, EMA, evaluation"
    form = Form.MICRO_STEP
    repeated = "the pass, from the running statistics before it"
    remember = "average weights and end epochs between `micro_step` and `after_optimizer_step`"

    epochs, average_every = 3, 2

    def __init__(self) -> None:
        torch.manual_seed(41)
        self.model: nn.Module = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), _Residual(4), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, CLASSES)),
        )
        self.loader = DataLoader(_dataset(41), batch_size=4, shuffle=True)
        self.optimizer = SGD(
            self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        self.optimizers = (self.optimizer,)
        main = CosineAnnealingLR(self.optimizer, T_max=self.epochs - 1)
        warmup = LinearLR(self.optimizer, start_factor=0.1, total_iters=1)
        self.scheduler = SequentialLR(self.optimizer, [warmup, main], milestones=[1])
        self.average = AveragedModel(self.model, avg_fn=get_ema_avg_fn(0.8), use_buffers=True)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.accuracies: list[float] = []

    def parts(self) -> tuple[Any, ...]:
        """Return the schedule and the averaged model."""
        return self.scheduler, self.average

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> None:
        """Note the accuracy of a model."""
        model.eval()
        hits = [(model(images).argmax(1) == labels).float() for images, labels in self.loader]
        self.accuracies.append(torch.cat(hits).mean().item())
        model.train()

    def bare(self) -> None:
        """Train as ``train.py`` of the reference does."""
        for epoch in range(self.epochs):
            for number, (images, labels) in enumerate(self.loader):
                loss = self.criterion(self.model(images), labels)
                self.optimizer.zero_grad()
                loss.backward()
                clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                if number % self.average_every == 0:
                    self.average.update_parameters(self.model)
                    if epoch < 1:  # the average of the warm-up is not kept
                        self.average.n_averaged.fill_(0)
            self.scheduler.step()
            self.evaluate(self.model)
            self.evaluate(self.average)

    def forward_backward(self, batch: Images) -> torch.Tensor:
        """Run one pass."""
        images, labels = batch
        loss: torch.Tensor = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def finish_step(self, step: int) -> None:
        """Apply step number ``step``, and what the reference does after it."""
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        epoch, number = divmod(step, len(self.loader))
        if number % self.average_every == 0:
            self.average.update_parameters(self.model)
            if epoch < 1:
                self.average.n_averaged.fill_(0)
        if number == len(self.loader) - 1:
            self.scheduler.step()

    def guarded(self) -> None:
        """Train with the passes in the Guard's hands."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(
            self.model, self.optimizer, scheduler=self.scheduler, extra=self.average
        )
        with Guard(
            self.model,
            self.optimizer,
            snapshots=self.snapshots,
            own_zero_grad=True,
            apply_again=lambda: self.finish_step(guard.steps_done),
        ) as guard:
            for batch in guard.batches(self.loader, steps=self.epochs * len(self.loader)):
                guard.micro_step(self.forward_backward, batch, last=True)
                self.finish_step(guard.steps_done)
                guard.after_optimizer_step()
                if guard.steps_done % len(self.loader) == 0:
                    self.evaluate(self.model)
                    self.evaluate(self.average)


class Mnist(Loop):
    """The MNIST example of PyTorch, in a program that must not be changed."""

    name = "mnist"
    like = "PyTorch's MNIST example, whose `train` and `test` are left as they are"
    form = Form.ATTACH
    repeated = "nothing: wrong products are repaired where they are computed"
    remember = (
        "gradients that are not finite end the run, and its restart continues; finite faults "
        "outside products and in the state at rest are not found: use another form"
    )
    faults = tuple(fault for fault in FaultKind if fault is not FaultKind.REST)

    epochs = 3

    def __init__(self) -> None:
        torch.manual_seed(43)
        self.model: nn.Module = nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.25)),
            *(nn.Linear(32, CLASSES), nn.LogSoftmax(1)),
        )
        self.loader = DataLoader(_dataset(43), batch_size=4, shuffle=True)
        self.optimizer = Adadelta(self.model.parameters(), lr=1.0)
        self.optimizers = (self.optimizer,)
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=0.7)
        self.losses: list[float] = []

    def parts(self) -> tuple[Any, ...]:
        """Return the schedule."""
        return (self.scheduler,)

    def train(self, data: torch.Tensor, target: torch.Tensor) -> None:
        """Do one step."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = functional.nll_loss(self.model(data), target)
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def test(self) -> None:
        """Note the loss of all images."""
        self.model.eval()
        found = [functional.nll_loss(self.model(x), y).item() for x, y in self.loader]
        self.losses.append(sum(found))

    def bare(self) -> None:
        """Train as the example does."""
        for _ in range(self.epochs):
            for data, target in self.loader:
                self.train(data, target)
            self.test()
            self.scheduler.step()

    def guarded(self) -> None:
        """Train with a Guard that only watches."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(self.model, self.optimizer, scheduler=self.scheduler)
        with Guard.attach(self.model, self.optimizer, snapshots=self.snapshots) as guard:
            for data, target in guard.batches(self.loader, steps=self.epochs * len(self.loader)):
                self.train(data, target)
                if guard.steps_done % len(self.loader) == 0:
                    self.test()
                    self.scheduler.step()


class Diffusion(Loop):
    """A denoising diffusion model whose weights are averaged after each step."""

    name = "ema"
    like = "diffusion: noise and times drawn in the pass, weights averaged after the step (EMA)"
    form = Form.STEP
    repeated = "the pass, with the same noise"
    remember = "average in `after=`, and save the average: `Snapshots(extra=…)`"

    steps = 14

    def __init__(self) -> None:
        torch.manual_seed(47)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(17, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 16)
        )
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = AdamW(self.model.parameters(), lr=3e-3)
        self.optimizers = (self.optimizer,)
        self.batches = [draw(6, 16, seed=step) for step in range(self.steps)]

    def parts(self) -> tuple[Any, ...]:
        """Return the averaged model."""
        return (self.average,)

    @torch.no_grad()
    def update_average(self) -> None:
        """Move the average towards the weights."""
        for kept, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
            kept.lerp_(now, 0.1)

    def forward_backward(self, images: torch.Tensor) -> torch.Tensor:
        """Run one pass: predict the noise that was added."""
        times = torch.rand(len(images), 1)
        noise = torch.randn_like(images)
        noisy = torch.cos(times * math.pi / 2) * images + torch.sin(times * math.pi / 2) * noise
        loss = functional.mse_loss(self.model(torch.cat([noisy, times], 1)), noise)
        loss.backward()
        return loss

    def bare(self) -> None:
        """Train and average."""
        for images in self.batches:
            self.forward_backward(images)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.update_average()

    def guarded(self) -> None:
        """Train with the steps in the Guard's hands."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(self.model, self.optimizer, extra=self.average)
        with Guard(
            self.model, self.optimizer, snapshots=self.snapshots, clip_grad_norm=1.0
        ) as guard:
            for images in guard.batches(self.batches, steps=self.steps):
                guard.step(self.forward_backward, images, after=self.update_average)


class Gan(Loop):
    """Two models with optimizers that take turns: each turn is a step of one Guard of both."""

    name = "gan"
    like = "a Wasserstein GAN: critic and generator with optimizers that take turns"
    form = Form.MICRO_STEP
    repeated = "the turn"
    remember = (
        "one Guard for both models and optimizers, a turn is a step; a turn makes its own fakes, "
        "because it cannot be repeated in the graph of another one"
    )

    pairs, noise = 7, 4

    def __init__(self) -> None:
        torch.manual_seed(53)
        self.generator = nn.Sequential(
            *(nn.Linear(self.noise, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.model = nn.ModuleList([self.generator, self.critic])
        self.optimizer_g = Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.optimizer_c = Adam(self.critic.parameters(), lr=4e-3, betas=(0.5, 0.999))
        self.optimizers = (self.optimizer_g, self.optimizer_c)
        rows = draw(6 * self.pairs, 8, seed=53).tanh()
        self.loader: DataLoader[torch.Tensor] = DataLoader(
            rows,  # type: ignore[arg-type]
            batch_size=6,
            shuffle=True,
        )

    def critic_pass(self, real: torch.Tensor) -> torch.Tensor:
        """Run the critic's pass, with a penalty on its gradient."""
        fake = self.generator(torch.randn(len(real), self.noise)).detach()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss: torch.Tensor = self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty
        loss.backward()
        return loss

    def generator_pass(self, count: int) -> torch.Tensor:
        """Run the generator's pass."""
        loss: torch.Tensor = -self.critic(self.generator(torch.randn(count, self.noise))).mean()
        loss.backward()
        return loss

    def apply(self, optimizer: Optimizer) -> None:
        """Apply one optimizer, and empty the gradients of both models."""
        optimizer.step()
        self.generator.zero_grad()
        self.critic.zero_grad()

    def bare(self) -> None:
        """Train in turns."""
        for real in self.loader:
            self.critic_pass(real)
            self.apply(self.optimizer_c)
            self.generator_pass(len(real))
            self.apply(self.optimizer_g)

    def finish_turn(self, step: int) -> None:
        """Apply the optimizer whose turn it is."""
        self.apply(self.optimizer_g if step % 2 else self.optimizer_c)

    def generators_turn(self, guard: Guard) -> None:
        """Do a step of the generator."""
        guard.micro_step(self.generator_pass, 6, last=True)
        self.finish_turn(guard.steps_done)
        guard.after_optimizer_step()

    def guarded(self) -> None:
        """Train with each turn in the hands of one Guard."""
        self.protection = protect(self.model)
        both = Optimizers(self.optimizer_g, self.optimizer_c)
        self.snapshots = Snapshots(self.model, both)
        with Guard(
            self.model,
            both,
            snapshots=self.snapshots,
            apply_again=lambda: self.finish_turn(guard.steps_done),
        ) as guard:
            if guard.steps_done % 2:  # a restart between two turns
                self.generators_turn(guard)
            for real in guard.batches(self.loader, steps=2 * self.pairs):
                guard.micro_step(self.critic_pass, real, last=True)
                self.finish_turn(guard.steps_done)
                guard.after_optimizer_step()
                self.generators_turn(guard)


class Augmented(Loop):
    """Augmentation drawn from generators of the loop's own."""

    name = "augmentation"
    like = "timm-like: a loader that shuffles and an augmentation that draws by own generators"
    form = Form.STEP
    repeated = "the pass, with the same augmentation"
    remember = "tell the Guard: `generators={…}`"

    epochs = 3

    def __init__(self) -> None:
        torch.manual_seed(59)
        self.model: nn.Module = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, CLASSES)
        )
        self.order, self.augmentation = (torch.Generator().manual_seed(n) for n in (1, 2))
        self.loader = DataLoader(_dataset(59), batch_size=4, shuffle=True, generator=self.order)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=2e-3, momentum=0.9)
        self.optimizers = (self.optimizer,)
        self.steps = self.epochs * len(self.loader)

    def mixed(self, images: torch.Tensor) -> torch.Tensor:
        """Turn some images round, shift them, and mix each with its neighbour."""
        turned = torch.rand(len(images), 1, 1, 1, generator=self.augmentation) < 0.5
        images = torch.where(turned, images.flip(-1), images)
        shift = int(torch.randint(-2, 3, (), generator=self.augmentation))
        share = float(torch.rand((), generator=self.augmentation)) / 2
        return images.roll(shift, -1).lerp(images.roll(1, 0), share)

    def forward_backward(self, batch: Images) -> torch.Tensor:
        """Run one pass of augmented images."""
        images, labels = batch
        loss = functional.cross_entropy(self.model(self.mixed(images)), labels)
        loss.backward()
        return loss

    def bare(self) -> None:
        """Train in epochs."""
        for _ in range(self.epochs):
            for batch in self.loader:
                self.optimizer.zero_grad()
                self.forward_backward(batch)
                self.optimizer.step()

    def guarded(self) -> None:
        """Train with the steps in the Guard's hands."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(self.model, self.optimizer)
        with Guard(
            self.model,
            self.optimizer,
            snapshots=self.snapshots,
            generators={"order": self.order, "augmentation": self.augmentation},
        ) as guard:
            for batch in guard.batches(self.loader, steps=self.steps):
                guard.step(self.forward_backward, batch)
