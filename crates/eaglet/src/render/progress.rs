//! The live line, and the plain line for places that are no terminal.

use super::units::{count, percent, time};
use eaglet_core::progress::{Phase, ServerPhase, ServerProgress, Snapshot};

/// One line about the state of a run, most important first, cut to `width` characters.
pub(crate) fn line(s: &Snapshot, width: usize) -> String {
    let phase = match s.phase {
        Phase::Running => "",
        Phase::ServerDown => "PAUSED server down | ",
        Phase::DiskBlocked => "PAUSED disk | ",
        Phase::Draining => "stopping | ",
        Phase::Ended => "ended | ",
    };
    let mut parts =
        vec![format!("{phase}{}/{} done ({})", count(s.done), count(s.planned), percent(s.done, s.planned))];
    if s.failed > 0 {
        parts.push(format!("{} failed", count(s.failed)));
    }
    parts.push(format!("{}/{} out", s.in_flight, s.concurrency));
    if let Some(rate) = s.tokens_per_s {
        parts.push(format!("{} tok/s", count(rate.round() as u64)));
    }
    if s.phase != Phase::Ended {
        parts.push(match s.eta_s {
            Some(eta) => format!("ETA {}", time(eta)),
            None => "ETA -".to_owned(),
        });
    }
    if s.waiting > 0 {
        parts.push(format!("{} retrying", s.waiting));
    }
    if s.servers.len() > 1 {
        let each: Vec<String> = s.servers.iter().map(one_server).collect();
        parts.push(format!("servers {}", each.join(" ")));
    }
    if let Some(queue) = s.server.waiting {
        parts.push(format!("queue {queue:.0}"));
    }
    if let Some(kv) = s.server.kv_use {
        parts.push(format!("KV {:.0} %", kv * 100.0));
    }
    if let Some(rate) = s.requests_per_s.filter(|rate| *rate > 0.0) {
        parts.push(format!("{rate:.1} req/s"));
    }
    let mut line = String::new();
    for part in parts {
        let longer = if line.is_empty() { part } else { format!("{line} | {part}") };
        if longer.chars().count() > width && !line.is_empty() {
            break;
        }
        line = longer;
    }
    line
}

/// Requests out and allowed, or why there are none.
fn one_server(server: &ServerProgress) -> String {
    match server.state {
        ServerPhase::Up => format!("{}/{}", server.in_flight, server.limit),
        ServerPhase::Down => "down".to_owned(),
        ServerPhase::Ejected => "left out".to_owned(),
        ServerPhase::Leaving => format!("{} leaving", server.in_flight),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use eaglet_core::progress::{Continued, ServerGauges, Tail};
    use eaglet_core::stats::{LossTable, percentiles};

    pub(crate) fn snapshot() -> Snapshot {
        let mut losses = LossTable::default();
        for n in 0..40 {
            losses.add(100, Some("gsm8k"), false);
            losses.add(5000, Some("essays"), n < 3);
        }
        Snapshot {
            v: 1,
            at: "2026-11-29T12:00:00.000Z".into(),
            pid: 7,
            phase: Phase::Running,
            elapsed_s: 3725.0,
            planned: 25_000,
            done: 4_200,
            failed: 3,
            in_flight: 128,
            waiting: 2,
            unsynced: 1,
            not_started: 20_666,
            concurrency: 128,
            requests_per_s: Some(1.2),
            tokens_per_s: Some(1536.4),
            tokens_per_s_overall: 1490.0,
            tokens: 5_550_000,
            usable_tokens_per_s: 1488.0,
            completion_tokens: percentiles(&[12, 800, 1263, 8192]),
            eta_s: Some(17_280.0),
            eta_basis: "1.20 prompts/s, mean of the last 30 s and the session".into(),
            retries_by_cause: [("reset", 4), ("overloaded", 11)].into(),
            failed_by_cause: [("context_too_long".to_owned(), 3)].into(),
            by_status: [("ok", 4100), ("truncated", 100)].into(),
            by_finish_reason: [("stop".to_owned(), 4100), ("length".to_owned(), 100)].into(),
            server: ServerGauges {
                running: Some(120.0),
                waiting: Some(8.0),
                kv_use: Some(0.42),
                ..ServerGauges::default()
            },
            servers: vec![],
            losses,
            continued: Continued { answers: 7, tokens_kept: 9120, tokens_lost: 31, started_again: 1 },
            tail: Some(Tail { seconds: 250.0, slots_used: 0.31 }),
        }
    }

    fn server(state: ServerPhase, in_flight: u64) -> ServerProgress {
        let (endpoint, gauges) = ("http://h:8000".to_owned(), ServerGauges::default());
        ServerProgress { endpoint, state, limit: 64, in_flight, tokens: 0, gauges }
    }

    #[test]
    fn several_servers_are_shown_one_by_one() {
        let servers = vec![server(ServerPhase::Up, 60), server(ServerPhase::Down, 0), server(ServerPhase::Ejected, 1)];
        let line = line(&Snapshot { servers, ..snapshot() }, 200);
        assert!(line.contains("| servers 60/64 down left out |"), "{line}");
    }

    #[test]
    fn the_line_fits_the_terminal() {
        insta::assert_snapshot!(line(&snapshot(), 79), @"4,200/25,000 done (17 %) | 3 failed | 128/128 out | 1,536 tok/s | ETA 4 h 48 m");
        insta::assert_snapshot!(line(&snapshot(), 200), @"4,200/25,000 done (17 %) | 3 failed | 128/128 out | 1,536 tok/s | ETA 4 h 48 m | 2 retrying | queue 8 | KV 42 % | 1.2 req/s");
        for width in 1..140 {
            assert!(line(&snapshot(), width).chars().count() <= width.max(24), "{width}");
        }
    }

    #[test]
    fn a_pause_stands_first() {
        let paused = Snapshot { phase: Phase::ServerDown, eta_s: None, ..snapshot() };
        assert!(line(&paused, 79).starts_with("PAUSED server down | 4,200/25,000"));
    }
}
