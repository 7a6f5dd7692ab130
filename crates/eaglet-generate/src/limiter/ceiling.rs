//! A limit known to be too high, for a while; and one known to be good. Pure.

/// How long a ceiling stands at first, in seconds; doubles each time it is hit again near the same place
/// after it was lifted.
const FIRST_S: f64 = 60.0;
/// Longest time a ceiling stands, in seconds.
const MAX_S: f64 = 900.0;
/// Hits within this share of each other are the same ceiling.
const SAME_SHARE: f64 = 0.25;

/// The ceiling.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ceiling {
    refused: Option<usize>,
    until_s: f64,
    stands: bool,
    lasts_s: f64,
    proven: Option<usize>,
}

impl Ceiling {
    /// The server did not want this limit.
    pub(super) fn hit(&mut self, limit: usize, now_s: f64) {
        let is_same = self.refused.is_some_and(|refused| limit.abs_diff(refused) as f64 <= refused as f64 * SAME_SHARE);
        // A second hit while it stands belongs to the same accident; one after it was lifted says that nothing has changed.
        self.lasts_s = match (self.stands, is_same) {
            (true, _) => self.lasts_s,
            (false, true) => (self.lasts_s * 2.0).clamp(FIRST_S, MAX_S),
            (false, false) => FIRST_S,
        };
        self.refused = Some(limit);
        self.until_s = now_s + self.lasts_s;
        self.stands = true;
        self.proven = self.proven.filter(|proven| *proven < limit);
    }

    /// Time passes.
    pub(super) fn pass(&mut self, now_s: f64) {
        // How long it lasted is remembered twice as long as it stood, so that the next hit is known as the same.
        if self.refused.is_some() && now_s > self.until_s + 2.0 * self.lasts_s {
            *self = Ceiling::default();
        }
        self.stands = self.refused.is_some() && now_s <= self.until_s;
    }

    /// A limit that went well.
    pub(super) fn held(&mut self, limit: usize) {
        self.proven = Some(self.proven.map_or(limit, |proven| proven.max(limit)));
    }

    /// The highest limit that went well below the one refused.
    pub(super) fn proven(&self) -> Option<usize> {
        self.proven
    }

    /// Whether the server refused anything of late.
    pub(super) fn is_known(&self) -> bool {
        self.refused.is_some()
    }

    /// The highest limit to be tried while the ceiling stands.
    pub(super) fn limit(&self) -> Option<usize> {
        let refused = self.refused.filter(|_| self.stands)?;
        Some(refused - (refused / 50).max(1).min(refused.saturating_sub(1)))
    }
}
