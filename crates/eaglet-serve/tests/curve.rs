//! The built-in profiles show the figures they are made for: tokens a second at a fixed number of requests in flight.

#![allow(clippy::unwrap_used)]

use eaglet_serve::random::Random;
use eaglet_serve::simulate::{Engine, NewSequence, Profile, profile::Lengths};

/// Answers kept in flight at `concurrency` for `answers` answers; tokens a second over the second half of the time.
fn tokens_per_s(profile: &Profile, concurrency: usize, answers: usize) -> f64 {
    let lengths = Lengths::new(&profile.answers);
    let mut random = Random::new(42);
    let mut engine = Engine::new(profile.clone());
    let mut next = || {
        let prompt_tokens = 50 + random.below(500) as usize;
        NewSequence { prompt_tokens, answer_tokens: lengths.draw(&mut random).min(profile.answers.max_tokens) }
    };
    for _ in 0..concurrency {
        engine.submit(next()).unwrap();
    }
    let (mut seconds, mut tokens, mut finished) = (0.0, 0, 0);
    while finished < answers {
        let step = engine.step().unwrap();
        for _ in &step.finished {
            engine.submit(next()).unwrap();
        }
        finished += step.finished.len();
        // The batch begins with short contexts only; the steady state is what is asked for.
        if finished > answers / 2 {
            seconds += step.duration_s;
            tokens += step.progressed.len();
        }
    }
    tokens as f64 / seconds
}

#[track_caller]
fn near(measured: f64, stated: f64, tolerance: f64, what: &str) {
    assert!((measured / stated - 1.0).abs() <= tolerance, "{what}: {measured:.0} tok/s, stated {stated}");
}

#[test]
fn kimi_on_eight_gpus_peaks_near_200_and_falls_beyond() {
    let profile = Profile::named("kimi-k2.5-8gpu").unwrap();
    let curve = [32, 64, 128, 200, 256].map(|n| tokens_per_s(&profile, n, n * 20));
    near(curve[2], 1536.0, 0.02, "128 in flight");
    near(curve[3], 1600.0, 0.02, "200 in flight");
    assert!(curve[4] < 0.97 * curve[3], "falls beyond: {curve:?}");
}

#[test]
fn a_small_model_on_a_cpu_is_flat_beyond_32() {
    let profile = Profile::named("small").unwrap();
    let at = |n| tokens_per_s(&profile, n, n * 40);
    near(at(1), 10.0, 0.1, "alone");
    near(at(32), 100.0, 0.05, "32 in flight");
    near(at(128), at(32), 0.02, "128 in flight against 32");
}
