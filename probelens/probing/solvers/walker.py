"""The path of one label set through the values of C: preconditioned L-BFGS in logit space.

A walker is a generator. It asks for products with the features and is sent them, so that `solver` can do the
products of many walkers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probelens.numerics import linalg
from probelens.numerics.modes import exact
from probelens.probing.solvers.factor import Factorised
from probelens.probing.solvers.links import Link
from probelens.probing.solvers.newton import Newton, cost
from probelens.probing.solvers.pairs import Pairs
from probelens.probing.solvers.precondition import Metric, Preconditioner

__all__ = ["LogisticFit", "Request", "Walker"]

_F32_FLOOR = 1e-6  # relative gap below which float32 gradients are noise
_SAFETY = 10.0  # the L-BFGS metric knows too little of flat directions and sees less than the whole gap
_NEAR = 0.3  # of the objective: largest gain that a first step may predict and be taken at once
_STEP = 100.0  # largest ratio of neighbouring C that is taken in one step
_LOOSE = 1e-2  # relative gap at values of C that are only passed
_FRESH = 5  # iterations for which a Hessian says what the gap is
_LARGEST = 30_000_000  # numbers stored to keep the preconditioner exact after projections

Request = tuple[str, Tensor]


@dataclass(frozen=True, eq=False)
class LogisticFit:
    """One solved logistic regression, in the space of the features that were given.

    Args:
        C: Inverse strength of the penalty, as in scikit-learn.
        coef: Weights, one row per class; a single row for two classes. (k, d) float64
        intercept: (k,) float64
        n_classes: Number of classes.
        objective: C · Σ wᵢ · log-loss + ½‖W‖² at the solution, in nats; W are the weights of the
            standardised features where these were standardised, ``coef`` otherwise.
        gap: Estimated relative distance of the objective from its minimum.
        gradient: Largest absolute entry of the gradient, divided by C · Σ wᵢ.
        n_iter: Iterations spent on this C and on the way to it.
        converged: Whether ``gap`` is within the tolerance asked for.
    """

    C: float
    coef: Tensor
    intercept: Tensor
    n_classes: int
    objective: float
    gap: float
    gradient: float
    n_iter: int
    converged: bool

    @exact
    def logits(self, X: Tensor) -> Tensor:
        """Logits of every class; for two classes they are ±half the decision function.

        Args:
            X: Features, as given to the fit. (n, d)

        Returns:
            Of every class. (n, n_classes)
        """
        coef, intercept = self.softmax()
        # In half precision the sum over features would lose what the weights know.
        X = X.to(torch.promote_types(X.dtype, torch.float32))
        return X @ coef.T.to(X) + intercept.to(X)

    def predict(self, X: Tensor) -> Tensor:
        """The most likely class of each row.

        Args:
            X: Features, as given to the fit. (n, d)

        Returns:
            Class ids. (n,) int64
        """
        return self.logits(X).argmax(1)

    def softmax(self) -> tuple[Tensor, Tensor]:
        """Weights (n_classes, d) and intercepts (n_classes,), one row per class for two classes as well."""
        if self.n_classes > 2:
            return self.coef, self.intercept
        return torch.cat([-self.coef, self.coef]) / 2, torch.cat([-self.intercept, self.intercept]) / 2


@dataclass(frozen=True, eq=False)
class _Guess:
    """Weights, intercepts, relative logits, loss without C, and probabilities minus targets."""

    w: Tensor
    b: Tensor
    z: Tensor
    loss: float
    r: Tensor


@dataclass(frozen=True, eq=False)
class _Point:
    """A guess with the gradient of its loss in place of the residual."""

    w: Tensor
    b: Tensor
    z: Tensor
    loss: float
    gw: Tensor
    gb: Tensor

    def to(self, dtype: torch.dtype) -> _Point:
        if self.w.dtype == dtype:
            return self
        w, b, z, gw, gb = (v.to(dtype) for v in (self.w, self.b, self.z, self.gw, self.gb))
        return _Point(w, b, z, self.loss, gw, gb)


@dataclass(frozen=True, eq=False)
class _End:
    """Where the optimisation at one C ended."""

    point: _Point
    objective: float
    gap: float
    n_iter: int


@dataclass(eq=False)
class Walker:
    """Solves one label set at growing C, at most ``max_iter`` iterations at each; ``stop`` ends the path by a fit."""

    shared: Factorised
    link: Link
    Cs: list[float]
    tol: float
    max_iter: int
    stop: Callable[[LogisticFit], bool] | None

    def __post_init__(self) -> None:
        shared = self.shared
        self.dtype = shared.x.dtype
        self.vectors = shared.rotation()
        # Where directions were removed after the factorisation, the preconditioner must know of them.
        removed = None if shared.refactored else shared.removed
        self.seen = None if removed is None else removed @ shared.vectors
        self.variances = shared.values / shared.total
        # What float32 can reach; float64 goes on from there where more is asked for.
        self.rough = max(self.tol, _F32_FLOOR) if self.dtype == torch.float32 else self.tol
        self.patience = cost(self.link.columns, shared.d)

    def run(self) -> Generator[Request, Tensor, list[LogisticFit]]:
        """Ask for ("logits", weights) or ("gradient", residuals); be sent x @ weightsᵀ or residualsᵀ @ x."""
        guess = self._start()
        point = yield from self._evaluate(guess, start=True)
        last: _Point | None = None
        before: _Point | None = None
        fits, n_iter = list[LogisticFit](), 0
        for C, wanted in self._steps(self._far(guess, point)):
            if last is not None:
                guess, before = self._extrapolate(C, last, before), last
                point = yield from self._evaluate(guess)
            precondition = self._preconditioner(C, guess.r)
            tol = self.rough if wanted else max(self.rough, _LOOSE)
            end = yield from self._minimise(C, point, precondition, tol, self.max_iter - n_iter)
            n_iter += end.n_iter
            if wanted and end.gap > self.tol and n_iter < self.max_iter and self.dtype != torch.float64:
                end = yield from self._finish(C, end, precondition, self.max_iter - n_iter)
                n_iter += end.n_iter
            last = end.point.to(self.dtype)
            if not wanted:
                continue
            fits.append(self._fit(C, end, n_iter))
            n_iter = 0
            if self.stop is not None and self.stop(fits[-1]):
                break
        return fits

    def _far(self, guess: _Guess, point: _Point) -> bool:
        """Whether a Newton step from the start to the first C predicts too large a gain to be trusted."""
        C = self.Cs[0]
        gw, gb = C * point.gw + point.w, C * point.gb
        dw, db = self._preconditioner(C, guess.r)(gw, gb)
        return _dot(gw, dw) + _dot(gb, db) > _NEAR * 2 * (C * point.loss + _half_square(point.w))

    def _steps(self, far: bool) -> list[tuple[float, bool]]:
        """The values of C to go through, with those in between that make large steps small."""
        # Below this the penalty rules and one step from zero is nearly exact.
        easy = 100 / (self.shared.total * max(float(self.variances.max()) if len(self.variances) else 0.0, 1e-300))
        out: list[tuple[float, bool]] = []
        reached = min(easy, self.Cs[0]) if far else self.Cs[0]
        for C in self.Cs:
            n = math.ceil(math.log(max(C / reached, 1.0)) / math.log(_STEP) - 1e-9)
            out += [(C * _STEP**-k, False) for k in range(n - 1, 0, -1)]
            out.append((C, True))
            reached = C
        return out

    def _start(self) -> _Guess:
        k, x = self.link.columns, self.shared.x
        w = x.new_zeros(k, self.shared.d)
        b = self.link.start().to(x) if self.shared.fit_intercept else x.new_zeros(k)
        z = self.link.relative(b.expand(self.shared.n, k).clone())
        return _Guess(w, b, z, *self.link.loss(z))

    def _finish(self, C: float, end: _End, precondition: Metric, left: int) -> Generator[Request, Tensor, _End]:
        """Continue in float64 from where float32 ended."""
        w, b = end.point.w.double(), end.point.b.double()
        z = self.link.relative((yield "logits", w) + b)
        point = yield from self._evaluate(_Guess(w, b, z, *self.link.loss(z)))
        return (yield from self._minimise(C, point, precondition, self.tol, left))

    def _evaluate(self, guess: _Guess, start: bool = False) -> Generator[Request, Tensor, _Point]:
        residual = self.link.weighted(guess.r)
        # With no weights yet, nothing projected out matters: every INLP step begins with the same gradient.
        what = f"gradient at {self.link.columns} columns without weights"
        kept = self.shared.memo.get(what) if start else None
        if kept is not None and torch.equal(kept[0], self.link.y):
            gw = kept[1]
        else:
            gw = yield "gradient", residual
            if start:
                self.shared.memo[what] = self.link.y, gw
        gw = self.shared.restrict(gw)
        gb = residual.sum(0) if self.shared.fit_intercept else torch.zeros_like(guess.b)
        return _Point(guess.w, guess.b, guess.z, guess.loss, gw, gb)

    def _minimise(
        self, C: float, at: _Point, precondition: Metric, tol: float, max_iter: int
    ) -> Generator[Request, Tensor, _End]:
        """Preconditioned L-BFGS from a point until the estimated gap is within ``tol``."""
        history = Pairs(at.w)
        objective = C * at.loss + _half_square(at.w)
        gw, gb = C * at.gw + at.w, C * at.gb
        n_iter, checked, renew = 0, -1, self.patience
        while True:
            dw, db = history.direction(gw, gb, precondition)
            slope = _dot(gw, dw) + _dot(gb, db)
            if slope > 0 and len(history):  # rounding has spoilt the pairs
                history.clear()
                continue
            gap = _SAFETY * abs(slope) / 2 / max(abs(objective), 1e-300)
            if gap <= tol < _LOOSE and n_iter > checked:
                # The preconditioner was made where this C began. Where classes separate, curvature has fallen
                # since, and the gap looks smaller than it is: look again with a fresh one.
                if isinstance(precondition, Newton):
                    precondition, checked = self._newton(C, at, precondition), n_iter + _FRESH
                else:
                    precondition, checked = self._preconditioner(C, self.link.loss(at.z)[1]), n_iter
                continue
            if gap <= tol or n_iter == max_iter or not slope < 0:
                break
            zd = self.link.relative((yield "logits", dw) + db)
            found = self._search(C, at, objective, dw, zd, slope)
            if found is None:
                break
            t, guess, objective = found
            new = yield from self._evaluate(replace(guess, w=at.w + t * dw, b=at.b + t * db))
            new_gw, new_gb = C * new.gw + new.w, C * new.gb
            history.add((t * dw, t * db), (new_gw - gw, new_gb - gb))
            at, gw, gb = new, new_gw, new_gb
            n_iter += 1
            if n_iter >= renew:
                precondition, renew, checked = self._newton(C, at, precondition), 2 * n_iter, n_iter + _FRESH
                history.clear()
        return _End(at, objective, gap, n_iter)

    def _search(
        self, C: float, at: _Point, objective: float, dw: Tensor, zd: Tensor, slope: float
    ) -> tuple[float, _Guess, float] | None:
        """A step along a direction, in logit space; None where rounding leaves nothing to gain."""
        cross, square, half = _dot(at.w, dw), _dot(dw, dw), _half_square(at.w)
        noise = (1e-7 if zd.dtype == torch.float32 else 1e-15) * abs(objective)
        low, high, t = 0.0, math.inf, 1.0
        best = None
        for _ in range(20):
            z = torch.add(at.z, zd, alpha=t)
            loss, r = self.link.loss(z)
            value = C * loss + half + t * cross + 0.5 * t * t * square
            derivative = C * self.link.slope(r, zd) + cross + t * square
            sound = math.isfinite(value) and math.isfinite(derivative)
            if sound and value <= objective + 1e-4 * t * slope + noise:
                best = (t, _Guess(at.w, at.b, z, loss, r), value)
                if abs(derivative) <= 0.5 * abs(slope):
                    break
            low, high = (low, t) if derivative > 0 or not sound else (t, high)
            curve = C * self.link.curvature(r, zd, zd) + square if sound else 0.0
            t = t - derivative / curve if curve > 0 else math.nan
            if not low < t < high:
                t = 0.5 * (low + high) if high < math.inf else 2 * max(low, 0.5)
            t = min(t, max(4 * low, 4.0))
        return best

    def _extrapolate(self, C: float, last: _Point, before: _Point | None) -> _Guess:
        """The best point, at a new C, in the span of the last solution and its last change."""
        own = self.link.relative(last.b.expand_as(last.z).clone())
        ways = [(last.w, torch.zeros_like(last.b), last.z - own)]
        if before is not None:
            ways.append((last.w - before.w, last.b - before.b, last.z - before.z))
        gram = torch.tensor([[_dot(a[0], c[0]) for c in ways] for a in ways], dtype=torch.float64)
        guess = _Guess(last.w, last.b, last.z, *self.link.loss(last.z))
        value = C * guess.loss + _half_square(guess.w)
        for _ in range(5):
            slopes = [C * self.link.slope(guess.r, z) + _dot(guess.w, w) for w, _, z in ways]
            slope = torch.tensor(slopes, dtype=torch.float64)
            curve = gram.clone()
            for i in range(len(ways)):
                for j in range(i + 1):
                    curve[i, j] += C * self.link.curvature(guess.r, ways[i][2], ways[j][2])
                    curve[j, i] = curve[i, j]
            curve += torch.diag(1e-7 * curve.diagonal() + 1e-30)
            step = -linalg.solve(curve, slope)
            if not -0.5 * float(step @ slope) > 0.1 * self.rough * value:
                break
            for scale in (1.0, 0.25, 0.06, 0.0):
                w, b, z = guess.w, guess.b, guess.z.clone()
                for c, (ww, bb, zz) in zip((scale * step).tolist(), ways):
                    w, b = torch.add(w, ww, alpha=c), torch.add(b, bb, alpha=c)
                    z.add_(zz, alpha=c)
                tried = _Guess(w, b, z, *self.link.loss(z))
                reached = C * tried.loss + _half_square(w)
                if reached < value:
                    guess, value = tried, reached
                    break
            else:
                break
        return guess

    def _preconditioner(self, C: float, r: Tensor) -> Preconditioner:
        share, classes = torch.linalg.eigh(self.link.covariance(r))
        floor = 1e-7 if self.dtype == torch.float32 else 1e-14
        share = share.clamp(min=floor * max(float(share[-1]), 1e-300))
        inverse = 1 / (C * share[:, None] * self.variances + 1)
        constraint = self._constraint(inverse - 1)
        inverse, classes, intercept = (p.to(self.dtype) for p in (inverse, classes, 1 / (C * share)))
        return Preconditioner(self.shared, self.vectors, inverse, classes, intercept, constraint)

    def _newton(self, C: float, at: _Point, otherwise: Metric) -> Metric:
        try:
            return Newton(self.shared, self.link, C, self.link.loss(at.z)[1])
        except torch.linalg.LinAlgError:
            return otherwise

    def _constraint(self, scale: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The terms that keep the inverse exact where directions were removed: Q, QV, and (Q M⁻¹ Qᵀ)⁻¹ for each M."""
        removed, seen = self.shared.removed, self.seen
        if removed is None or seen is None or len(removed) ** 2 * len(scale) > _LARGEST:
            return None
        within = (seen * scale[:, None]) @ seen.T
        within += torch.eye(len(removed), dtype=within.dtype, device=within.device)
        return removed.to(self.dtype), seen.to(self.dtype), linalg.inverse(within).to(self.dtype)

    def _fit(self, C: float, end: _End, n_iter: int) -> LogisticFit:
        w, b = end.point.w.double(), end.point.b.double()
        gradient = max(float((C * end.point.gw + end.point.w).abs().max()), C * float(end.point.gb.abs().max()))
        if self.link.columns > 1 and self.shared.fit_intercept:
            b = b - b.mean()
        w = w / self.shared.scale
        intercept, k = b - w @ self.shared.mean, max(2, self.link.columns)
        gradient /= C * self.shared.total
        return LogisticFit(C, w, intercept, k, end.objective, end.gap, gradient, n_iter, end.gap <= self.tol)


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1), b.reshape(-1)))


def _half_square(w: Tensor) -> float:
    return 0.5 * _dot(w, w)
