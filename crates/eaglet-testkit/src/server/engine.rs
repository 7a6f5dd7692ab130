//! The batch of a pretended inference engine: who runs, who waits, how full the key-value cache is, and the counters of it.
//!
//! No tokens and no pace here, only admission and accounting. No fairness beyond first come, first served.
//!
//! Invariants: at most `max_running` slots exist at once; a slot gives its room back when dropped, whatever ended it; a waiter
//! that went away takes no slot.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::oneshot;

use eaglet_serve::{
    answer::Finish,
    api::{Counters, Gauges},
};

/// The engine of one server.
#[derive(Debug)]
pub(super) struct Engine {
    max_running: usize,
    kv_cache_tokens: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    /// Bounded by the number of open connections, each of which has at most one request here.
    waiting: VecDeque<Waiter>,
    kv_tokens: usize,
    counters: Counters,
}

#[derive(Debug)]
struct Waiter {
    tokens: usize,
    admitted: oneshot::Sender<Slot>,
}

impl Engine {
    pub(super) fn new(max_running: usize, kv_cache_tokens: usize) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(Self { max_running: max_running.max(1), kv_cache_tokens: kv_cache_tokens.max(1), state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the engine")
    }

    pub(super) fn gauges(&self) -> Gauges {
        let state = self.state();
        Gauges {
            running: state.running,
            waiting: state.waiting.iter().filter(|waiter| !waiter.admitted.is_closed()).count(),
            kv_cache_usage: (state.kv_tokens as f64 / self.kv_cache_tokens as f64).min(1.0),
            counters: state.counters,
        }
    }

    pub(super) fn count_prompt(&self, tokens: usize) {
        self.state().counters.prompt_tokens += tokens as u64;
    }

    pub(super) fn count_finish(&self, finish: Finish) {
        let mut state = self.state();
        match finish {
            Finish::Stop => state.counters.stopped += 1,
            Finish::Length | Finish::Abort => state.counters.cut_by_length += 1,
        }
    }

    /// Waits for a place among the running, with `tokens` already in the cache.
    pub(super) async fn admit(self: &Arc<Self>, tokens: usize) -> Slot {
        let (admitted, slot) = oneshot::channel();
        self.state().waiting.push_back(Waiter { tokens, admitted });
        self.pump();
        slot.await.expect("the engine outlives its waiters and never drops a sender unused")
    }

    fn fits(&self, state: &State, tokens: usize) -> bool {
        let room = state.kv_tokens + tokens <= self.kv_cache_tokens;
        state.running == 0 || (state.running < self.max_running && room)
    }

    /// Admits from the front of the queue while there is room.
    fn pump(self: &Arc<Self>) {
        loop {
            let (waiter, slot) = {
                let mut state = self.state();
                while state.waiting.front().is_some_and(|waiter| waiter.admitted.is_closed()) {
                    state.waiting.pop_front();
                }
                let Some(tokens) = state.waiting.front().map(|waiter| waiter.tokens) else {
                    return;
                };
                if !self.fits(&state, tokens) {
                    return;
                }
                let Some(waiter) = state.waiting.pop_front() else {
                    return;
                };
                state.running += 1;
                state.kv_tokens += tokens;
                (waiter, Slot { engine: Some(Arc::clone(self)), tokens })
            };
            if let Err(mut unused) = waiter.admitted.send(slot) {
                // Given back without the pump of its drop: this loop goes on anyway, and must not nest.
                unused.release();
            }
        }
    }
}

/// A place among the running.
#[derive(Debug)]
pub(super) struct Slot {
    engine: Option<Arc<Engine>>,
    tokens: usize,
}

impl Slot {
    fn release(&mut self) -> Option<Arc<Engine>> {
        let engine = self.engine.take()?;
        let mut state = engine.state();
        state.running -= 1;
        state.kv_tokens -= self.tokens;
        drop(state);
        Some(engine)
    }

    /// Counts `tokens` generated; afterwards this request may have been preempted and admitted again.
    pub(super) async fn generated(&mut self, tokens: usize) {
        let Some(engine) = self.engine.clone() else {
            return;
        };
        let preempted = {
            let mut state = engine.state();
            state.counters.generation_tokens += tokens as u64;
            state.kv_tokens += tokens;
            self.tokens += tokens;
            state.kv_tokens > engine.kv_cache_tokens && state.running > 1
        };
        if preempted {
            self.release();
            let (admitted, slot) = oneshot::channel();
            {
                let mut state = engine.state();
                state.counters.preemptions += 1;
                state.waiting.push_front(Waiter { tokens: self.tokens, admitted });
            }
            engine.pump();
            *self = slot.await.expect("the engine never drops a sender unused");
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(engine) = self.release() {
            engine.pump();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::{Pin, pin},
        task::{Context, Poll, Waker},
    };

    use super::*;

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn ready<T>(poll: Poll<T>) -> T {
        match poll {
            Poll::Ready(value) => value,
            Poll::Pending => panic!("still waiting"),
        }
    }

    #[test]
    fn requests_beyond_the_batch_wait_their_turn() {
        let engine = Engine::new(1, 1000);
        let first = ready(poll(pin!(engine.admit(10))));
        let mut second = pin!(engine.admit(10));
        let mut third = Box::pin(engine.admit(10));
        assert!(poll(second.as_mut()).is_pending());
        assert!(poll(third.as_mut()).is_pending());
        assert_eq!((engine.gauges().running, engine.gauges().waiting), (1, 2));
        drop(first);
        assert!(poll(third.as_mut()).is_pending(), "the second came first");
        let second = ready(poll(second));
        drop(third);
        assert_eq!((engine.gauges().running, engine.gauges().waiting), (1, 0));
        drop(second);
        assert_eq!((engine.gauges().running, engine.gauges().kv_cache_usage), (0, 0.0));
    }

    #[test]
    fn a_full_cache_preempts_and_the_room_comes_back() {
        let engine = Engine::new(8, 100);
        let mut first = ready(poll(pin!(engine.admit(50))));
        let second = ready(poll(pin!(engine.admit(50))));
        {
            let mut step = pin!(first.generated(1));
            assert!(poll(step.as_mut()).is_pending());
            assert_eq!((engine.gauges().running, engine.gauges().waiting), (1, 1));
            assert_eq!(engine.gauges().counters.preemptions, 1);
            drop(second);
            ready(poll(step));
        }
        assert_eq!((engine.gauges().running, engine.gauges().counters.generation_tokens), (1, 1));
        drop(first);
        assert_eq!(engine.gauges().kv_cache_usage, 0.0);
    }
}
