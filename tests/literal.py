"""Slow, literal transcriptions of the paper's algorithms: a second implementation to check with.

Written from the paper alone. "L. n" cites lines of its LaTeX source. The model is the Gaussian
mixture with known covariance; s = (s1, s2) is the vector concat(s1 (K,), s2.ravel() (K*d,)).
Weights w_i stand where 1/n stood, w_i/p_i where 1/(np) stood (reading note 1). No guard: the
caller keeps T(s) defined. Rounds here are k = 1..rounds; the paper's index is k - 1.
"""

import numpy as np


def sbar(y, weights_pi, means, Sigma):
    """Conditional expectation of s(y, z) given y, for one observation (L. 3600-3609, 3641-3650)."""
    K, d = len(weights_pi), len(y)
    logdet = np.linalg.slogdet(Sigma)[1]
    log_joint = np.zeros(K)  # log of pi_l N(mu_l, Sigma)[y], L. 3647-3649
    for ell in range(K):
        r = y - means[ell]
        log_density = -0.5 * (d * np.log(2 * np.pi) + logdet + r @ np.linalg.solve(Sigma, r))
        log_joint[ell] = np.log(weights_pi[ell]) + log_density
    top = log_joint.max()
    log_marginal = top + np.log(np.sum(np.exp(log_joint - top)))
    rho = np.exp(log_joint - log_marginal)
    s1, s2 = np.zeros(K), np.zeros((K, d))
    for ell in range(K):
        s1[ell] = rho[ell]
        s2[ell] = y * rho[ell]
    return np.concatenate([s1, s2.ravel()])


def T(s, K, d):
    """M-step, Sigma known (L. 3698-3700): only pi is normalised, mu divides by the raw s1."""
    s1, s2 = s[:K], s[K:].reshape(K, d)
    pi, means = np.zeros(K), np.zeros((K, d))
    for ell in range(K):
        pi[ell] = s1[ell] / s1.sum()
        means[ell] = s2[ell] / s1[ell]
    return pi, means


def mean_sbar(Yi, rows, theta, Sigma):
    """Mean of sbar over the listed rows of one worker, repeats counted; None is every row."""
    rows = range(len(Yi)) if rows is None else rows
    total = 0.0
    for j in rows:
        total = total + sbar(Yi[j], *theta, Sigma)
    return total / len(rows)


def literal_fedem(Y, w, p, Sigma, K, S0, V0, gamma, alpha, rounds, active, batch, quantise):
    """Algorithm 1, FedEM with partial participation (L. 447-484)."""
    n, d = len(Y), Y[0].shape[1]
    out = {"S": [], "H": [], "V": []}
    S = np.array(S0, dtype=float)
    Vi = [np.array(v, dtype=float) for v in V0]
    V = sum(w[i] * Vi[i] for i in range(n))  # L. 455
    for k in range(1, rounds + 1):  # L. 455-456
        A = active(k)  # L. 456
        theta = T(S, K, d)  # sent by the server at the end of the round before, L. 483
        Q = {}
        for i in A:  # L. 458
            Si = mean_sbar(Y[i], batch(k, i), theta, Sigma)  # L. 460-461, 3806-3807
            Delta = Si - Vi[i] - S  # L. 463
            Q[i] = quantise(k, i, Delta)  # one draw, both kept and sent
            Vi[i] = Vi[i] + alpha * Q[i]  # L. 465; the others keep theirs, L. 469-472
        H = V
        for i in A:  # L. 476-477, with the old V
            H = H + (w[i] / p[i]) * Q[i]
        S = S + gamma * H  # L. 479
        for i in A:  # L. 481-482, no 1/p here
            V = V + alpha * w[i] * Q[i]
        out["S"].append(S)
        out["H"].append(H)
        out["V"].append(V)
    out["Vi"] = Vi
    return out


def literal_vr_fedem(
    Y, w, p, Sigma, K, S0, V0, gamma, alpha, rounds, k_in, active, batch, quantise
):
    """Algorithm 2, VR-FedEM (L. 761-793), with partial participation as in reading note 5.

    Each outer loop restarts S_i by a full pass, made at the worker's first active round of the
    loop at the parameters of that round. With everyone active this is L. 770-771 and 790-791:
    the increment of that round is zero as S_{t,-1} = S_{t,0}, so its batch is not asked for.
    """
    n, d = len(Y), Y[0].shape[1]
    out = {"S": [], "H": [], "V": []}
    S = np.array(S0, dtype=float)  # L. 768
    Vi = [np.array(v, dtype=float) for v in V0]
    V = sum(w[i] * Vi[i] for i in range(n))  # L. 768-769
    Si = [None] * n  # the pair (S_i, theta_ref) of each worker
    theta_ref = [None] * n
    last_loop = [None] * n  # the outer loop in which the worker was last active
    for k in range(1, rounds + 1):
        t = (k - 1) // k_in  # outer loop, counted from 0; L. 771-772
        A = active(k)
        theta = T(S, K, d)  # L. 787
        Q = {}
        for i in A:  # L. 772-773
            if last_loop[i] != t:
                Si[i] = mean_sbar(Y[i], None, theta, Sigma)  # L. 770-771, 791
                last_loop[i] = t
            else:
                rows = batch(k, i)  # L. 773-774
                rows = range(len(Y[i])) if rows is None else rows
                increment = 0.0
                for j in rows:  # L. 775-778
                    new = sbar(Y[i][j], *theta, Sigma)
                    old = sbar(Y[i][j], *theta_ref[i], Sigma)
                    increment = increment + (new - old)
                Si[i] = Si[i] + increment / len(rows)
            theta_ref[i] = theta
            Delta = Si[i] - S - Vi[i]  # L. 778-779
            Q[i] = quantise(k, i, Delta)
            Vi[i] = Vi[i] + alpha * Q[i]  # L. 780; carried over outer loops, L. 792
        H = V
        for i in A:  # L. 784, with 1/p_i as at L. 476
            H = H + (w[i] / p[i]) * Q[i]
        S = S + gamma * H  # L. 785; carried over outer loops, L. 788
        for i in A:  # L. 786; carried over outer loops, L. 789
            V = V + alpha * w[i] * Q[i]
        out["S"].append(S)
        out["H"].append(H)
        out["V"].append(V)
    out["Vi"] = Vi
    return out
