use super::*;
use proptest::prelude::*;
use std::time::Duration;

fn full(limit: usize, rate: f64) -> Window {
    Window {
        duration: Duration::from_secs(1),
        tokens: rate as u64,
        mean_in_flight: limit as f64,
        mean_unstarted: Some(0.0),
        completions: 1,
        ..Window::default()
    }
}

/// One cohort of 128, its first 10 replies are overloads, then 600 successes: 118 in the next 600 ms, then one every 20 ms.
#[test]
fn a_burst_of_refusals_lowers_the_limit_once_and_it_comes_back() {
    let mut limiter = Limiter::new(LimiterSettings { initial: 128, ..LimiterSettings::up_to(128) });
    let mut decreases = 0;
    let mut lowest = 128;
    let mut see = |limiter: &mut Limiter, completions: u64, back_pressure: u64| {
        let window = Window { completions, back_pressure, mean_in_flight: limiter.limit() as f64, ..full(128, 1500.0) };
        if let Some(change) = limiter.observe(&window) {
            decreases += usize::from(change.to < change.from);
        }
        lowest = lowest.min(limiter.limit());
    };
    see(&mut limiter, 0, 6);
    see(&mut limiter, 20, 4);
    see(&mut limiter, 98, 0);
    for _ in 0..10 {
        see(&mut limiter, 50, 0);
    }
    assert!(lowest >= 64, "{lowest}");
    assert_eq!(decreases, 1);
    assert_eq!(limiter.limit(), 128);
}

#[test]
fn it_doubles_while_the_rate_grows() {
    let mut limiter = Limiter::new(LimiterSettings::up_to(1024));
    let mut seconds = 0;
    while limiter.limit() < 256 {
        let limit = limiter.limit();
        limiter.observe(&full(limit, limit as f64 * 10.0));
        seconds += 1;
        assert!(seconds < 60, "at {limit} after a minute");
    }
}

#[test]
fn too_few_prompts_to_fill_it_teach_nothing() {
    let mut limiter = Limiter::new(LimiterSettings::up_to(1024));
    for _ in 0..600 {
        assert_eq!(limiter.observe(&Window { mean_in_flight: 3.0, ..full(16, 30.0) }), None);
    }
}

fn any_window() -> impl Strategy<Value = Window> {
    let gauges = (prop::option::of(0.0..600.0f64), prop::option::of(0.0..600.0f64), prop::option::of(0.0..50.0f64));
    (0u64..5000, 0.0..600.0f64, prop::option::of(0.0..600.0f64), 0u64..50, 0u64..20, gauges, 1u64..6000).prop_map(
        |(tokens, mean_in_flight, mean_unstarted, completions, refused, (running, waiting, preemptions), ms)| Window {
            duration: Duration::from_millis(ms),
            tokens,
            mean_in_flight,
            mean_unstarted,
            completions,
            completed_tokens: completions * 100,
            completed_time: Duration::from_secs(completions * 10),
            back_pressure: refused.saturating_sub(15),
            refused_time: Duration::from_millis(refused * 30),
            gauges: Gauges { running, waiting, kv_use: None, preemptions },
        },
    )
}

proptest! {
    /// Whatever it is told: the limit stays within its bounds, and what it says is what it did.
    #[test]
    fn the_limit_stays_within_its_bounds(
        windows in prop::collection::vec((any_window(), any::<bool>(), 0u8..40), 1..300),
        (min, max, initial) in (1usize..50, 1usize..600, 1usize..600),
        replies in any::<bool>(),
    ) {
        let source = if replies { RateSource::Replies } else { RateSource::Stream };
        let mut limiter = Limiter::new(LimiterSettings { initial, min, max, source });
        for (mut window, is_full, restart) in windows {
            if is_full {
                window.mean_in_flight = limiter.limit() as f64;
            }
            let before = limiter.limit();
            let change = if restart == 0 { limiter.restarted() } else { limiter.observe(&window) };
            prop_assert!((min.min(max)..=max).contains(&limiter.limit()));
            match change {
                Some(change) => prop_assert_eq!((change.from, change.to), (before, limiter.limit())),
                None => prop_assert_eq!(before, limiter.limit()),
            }
        }
    }

    /// Refusals again and again, while the requests of one cohort come back: one decrease.
    #[test]
    fn one_cohort_lowers_it_once(refused in prop::collection::vec(1u64..8, 2..10)) {
        let mut limiter = Limiter::new(LimiterSettings { initial: 128, ..LimiterSettings::up_to(1024) });
        let decreases = refused
            .iter()
            .filter(|refused| {
                let window = Window { back_pressure: **refused, completions: 0, ..full(limiter.limit(), 1000.0) };
                limiter.observe(&window).is_some_and(|change| change.to < change.from)
            })
            .count();
        prop_assert_eq!(decreases, 1);
    }
}
