//! The end of a run, and `eaglet status`: totals, lengths, throughput, and what was lost.

use super::units::{count, percent, time};
use eaglet_core::progress::Snapshot;
use eaglet_core::stats::Loss;
use std::fmt::Write;

/// At most so many sources are listed, those with the largest share of losses first.
const SOURCES_SHOWN_MAX: usize = 8;
/// A shorter end is not worth a line, seconds.
const TAIL_SHOWN_MIN_S: f64 = 60.0;

/// The summary, at most 80 columns wide for ordinary names.
pub(crate) fn text(s: &Snapshot) -> String {
    let mut out = String::new();
    let left = s.planned - s.done - s.failed;
    let _ = writeln!(
        out,
        "prompts     {} of {} done, {} failed, {} left",
        count(s.done),
        count(s.planned),
        count(s.failed),
        count(left)
    );
    let joined = |counts: Vec<(String, u64)>| {
        counts.iter().map(|(name, n)| format!("{name} {}", count(*n))).collect::<Vec<_>>().join(", ")
    };
    let session = |counts: Vec<(String, u64)>, label: &str, out: &mut String| {
        if !counts.is_empty() {
            let _ = writeln!(out, "{label:<12}{}", joined(counts));
        }
    };
    let owned = |map: &std::collections::BTreeMap<&'static str, u64>| {
        map.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect::<Vec<_>>()
    };
    session(owned(&s.by_status), "answers", &mut out);
    session(s.by_finish_reason.clone().into_iter().collect(), "finish", &mut out);
    session(s.failed_by_cause.clone().into_iter().collect(), "failures", &mut out);
    session(owned(&s.retries_by_cause), "retries", &mut out);
    let c = &s.continued;
    if c.answers + c.tokens_kept + c.started_again > 0 {
        let again =
            if c.started_again > 0 { format!(", {} started again", count(c.started_again)) } else { String::new() };
        let _ = writeln!(
            out,
            "continued   {} answers, {} tokens kept, {} lost{again}",
            count(c.answers),
            count(c.tokens_kept),
            count(c.tokens_lost)
        );
    }
    if let Some(p) = &s.completion_tokens {
        let _ = writeln!(
            out,
            "tokens      mean {:.0}, p50 {}, p90 {}, p95 {}, p99 {}, max {} per answer",
            p.mean, p.p50, p.p90, p.p95, p.p99, p.max
        );
    }
    let _ = writeln!(
        out,
        "throughput  {} tok/s over {}, of it usable {} tok/s",
        count(s.tokens_per_s_overall.round() as u64),
        time(s.elapsed_s),
        count(s.usable_tokens_per_s.round() as u64)
    );
    if let Some(tail) = s.tail.filter(|tail| tail.seconds >= TAIL_SHOWN_MIN_S) {
        let used = (tail.slots_used * 100.0).round();
        let _ = writeln!(
            out,
            "tail        {} after the last prompt was sent, {used} % of the slots in use",
            time(tail.seconds)
        );
    }
    losses(s, &mut out);
    out
}

fn losses(s: &Snapshot, out: &mut String) {
    let lost: u64 = s.losses.by_length.values().map(|loss| loss.lost).sum();
    if lost == 0 {
        return;
    }
    let row = |name: &str, loss: &Loss| {
        format!(
            "  {name:<24}{:>8} of {:>8}  {:>6}\n",
            count(loss.lost),
            count(loss.ended),
            percent(loss.lost, loss.ended)
        )
    };
    out.push_str("lost by prompt length\n");
    // In the order of the lengths, not of their names.
    for bytes in std::iter::once(0).chain(eaglet_core::stats::PROMPT_BYTES_BUCKETS) {
        let name = eaglet_core::stats::prompt_bytes_bucket(bytes);
        if let Some(loss) = s.losses.by_length.get(name) {
            out.push_str(&row(name, loss));
        }
    }
    let mut sources: Vec<_> = s.losses.by_source.iter().filter(|(_, loss)| loss.lost > 0).collect();
    sources.sort_by(|a, b| (b.1.lost * a.1.ended).cmp(&(a.1.lost * b.1.ended)));
    out.push_str("lost by source\n");
    for (name, loss) in sources.iter().take(SOURCES_SHOWN_MAX) {
        out.push_str(&row(&name.chars().take(23).collect::<String>(), loss));
    }
    if sources.len() > SOURCES_SHOWN_MAX {
        let _ = writeln!(out, "  and {} more sources (progress.json has all)", sources.len() - SOURCES_SHOWN_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::progress::tests::snapshot;

    #[test]
    fn the_summary_says_what_was_lost() {
        insta::assert_snapshot!(text(&snapshot()), @r"
        prompts     4,200 of 25,000 done, 3 failed, 20,797 left
        answers     ok 4,100, truncated 100
        finish      length 100, stop 4,100
        failures    context_too_long 3
        retries     overloaded 11, reset 4
        continued   7 answers, 9,120 tokens kept, 31 lost, 1 started again
        tokens      mean 2567, p50 800, p90 8192, p95 8192, p99 8192, max 8192 per answer
        throughput  1,490 tok/s over 1 h 02 m, of it usable 1,488 tok/s
        tail        4 m 10 s after the last prompt was sent, 31 % of the slots in use
        lost by prompt length
          < 256 B                        0 of       40     0 %
          < 16 KiB                       3 of       40   7.5 %
        lost by source
          essays                         3 of       40   7.5 %
        ");
    }
}
