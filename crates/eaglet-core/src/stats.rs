//! Small statistics: percentiles, rates over a window, counts by bucket.

use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Percentiles of a set of counts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    /// Number of values.
    pub count: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest value.
    pub min: u32,
    /// Half the values are at most this.
    pub p50: u32,
    /// 90 % of the values are at most this.
    pub p90: u32,
    /// 95 % of the values are at most this.
    pub p95: u32,
    /// 99 % of the values are at most this.
    pub p99: u32,
    /// Largest value.
    pub max: u32,
}

/// Percentiles by the nearest-rank method; `None` of nothing.
pub fn percentiles(values: &[u32]) -> Option<Percentiles> {
    if values.is_empty() {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = |p: f64| sorted[((p * sorted.len() as f64).ceil() as usize).clamp(1, sorted.len()) - 1];
    Some(Percentiles {
        count: sorted.len(),
        mean: sorted.iter().map(|v| f64::from(*v)).sum::<f64>() / sorted.len() as f64,
        min: sorted[0],
        p50: rank(0.50),
        p90: rank(0.90),
        p95: rank(0.95),
        p99: rank(0.99),
        max: sorted[sorted.len() - 1],
    })
}

/// Rate of a counter over a sliding window: fed with (time since start, running total), once per tick.
#[derive(Clone, Debug)]
pub struct RateWindow {
    window: Duration,
    samples: VecDeque<(Duration, f64)>,
}

impl RateWindow {
    /// A rate over the last `window`.
    pub fn new(window: Duration) -> Self {
        RateWindow { window, samples: VecDeque::new() }
    }

    /// Takes the counter's total at a time.
    pub fn push(&mut self, now: Duration, total: f64) {
        self.samples.push_back((now, total));
        while self.samples.len() > 2 && self.samples[1].0 + self.window <= now {
            self.samples.pop_front();
        }
    }

    /// Units per second; `None` before there are two samples apart in time.
    pub fn per_second(&self) -> Option<f64> {
        let (from, to) = (self.samples.front()?, self.samples.back()?);
        let seconds = (to.0 - from.0).as_secs_f64();
        (seconds > 0.0).then(|| (to.1 - from.1) / seconds)
    }
}

/// Upper bounds of the prompt-length buckets, in UTF-8 bytes of message text.
pub const PROMPT_BYTES_BUCKETS: [u64; 5] = [256, 1024, 4096, 16_384, 65_536];

/// The name of the bucket that a prompt length falls into.
pub fn prompt_bytes_bucket(bytes: u64) -> &'static str {
    const NAMES: [&str; 6] = ["< 256 B", "< 1 KiB", "< 4 KiB", "< 16 KiB", "< 64 KiB", ">= 64 KiB"];
    NAMES[PROMPT_BYTES_BUCKETS.iter().take_while(|bound| bytes >= **bound).count()]
}

/// Ended and lost prompts of one bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Loss {
    /// Prompts that ended, well or not.
    pub ended: u64,
    /// Of these, without a usable response.
    pub lost: u64,
}

/// What a run lost, by prompt length and by source, so that a bias shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LossTable {
    /// By prompt-length bucket.
    pub by_length: BTreeMap<&'static str, Loss>,
    /// By source; at most [`SOURCES_MAX`] of them, the rest together as `(other)`.
    pub by_source: BTreeMap<String, Loss>,
}

/// A data set whose source column is unique per row must not fill the memory.
pub const SOURCES_MAX: usize = 200;

impl LossTable {
    /// Counts one prompt that ended.
    pub fn add(&mut self, prompt_bytes: u64, source: Option<&str>, lost: bool) {
        let mut source = source.unwrap_or("(none)");
        if self.by_source.len() >= SOURCES_MAX && !self.by_source.contains_key(source) {
            source = "(other)";
        }
        let by_length = self.by_length.entry(prompt_bytes_bucket(prompt_bytes)).or_default();
        let by_source = self.by_source.entry(source.to_owned()).or_default();
        for loss in [by_length, by_source] {
            loss.ended += 1;
            loss.lost += u64::from(lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let p = percentiles(&(1..=100).collect::<Vec<u32>>()).unwrap();
        assert_eq!((p.min, p.p50, p.p90, p.p95, p.p99, p.max), (1, 50, 90, 95, 99, 100));
        assert_eq!(percentiles(&[7]).unwrap().p50, 7);
        assert_eq!(percentiles(&[]), None);
    }

    #[test]
    fn a_rate_forgets_what_is_older_than_its_window() {
        let mut rate = RateWindow::new(Duration::from_secs(30));
        assert_eq!(rate.per_second(), None);
        for second in 0..=100u32 {
            let total = f64::from(second.min(60)) * 10.0;
            rate.push(Duration::from_secs(second.into()), total);
        }
        assert_eq!(rate.per_second(), Some(0.0));
    }

    #[test]
    fn buckets_cover_every_length() {
        assert_eq!(prompt_bytes_bucket(0), "< 256 B");
        assert_eq!(prompt_bytes_bucket(256), "< 1 KiB");
        assert_eq!(prompt_bytes_bucket(65_535), "< 64 KiB");
        assert_eq!(prompt_bytes_bucket(u64::MAX), ">= 64 KiB");
    }

    #[test]
    fn a_source_per_row_does_not_fill_the_memory() {
        let mut table = LossTable::default();
        for row in 0..1000 {
            table.add(10, Some(&format!("s{row}")), row % 2 == 0);
        }
        assert_eq!(table.by_source.len(), SOURCES_MAX + 1);
        assert_eq!(table.by_length["< 256 B"], Loss { ended: 1000, lost: 500 });
    }
}
