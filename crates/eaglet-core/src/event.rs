//! What happened during a run, one JSON object a line in `events.jsonl`, for the report and for monitors.
//!
//! Events are a by-product: failing to write one is a warning, never the end of a run.

use serde::{Deserialize, Serialize};

/// Something worth remembering about a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A session began.
    Started {
        /// Prompts in the plan.
        planned: u64,
        /// Of these, ended in earlier sessions.
        already_ended: u64,
    },
    /// Something a person should read.
    Notice {
        /// In words.
        text: String,
    },
    /// The server cannot be reached; nothing is sent until it is back.
    ServerDown {
        /// Server, without credentials.
        endpoint: String,
        /// Why eaglet thinks so.
        reason: String,
        /// Other servers that are up; with none the run pauses.
        #[serde(default)]
        others_up: u64,
    },
    /// The server is back.
    ServerUp {
        /// Server, without credentials.
        endpoint: String,
        /// Seconds it was away.
        down_s: f64,
    },
    /// A server joined the run while it went on.
    ServerAdded {
        /// Server, without credentials.
        endpoint: String,
    },
    /// A server left the run.
    ServerRemoved {
        /// Server, without credentials.
        endpoint: String,
        /// Why.
        reason: String,
    },
    /// Requests broke on a server one after another: it gets none for a while, the others do.
    ServerEjected {
        /// Server, without credentials.
        endpoint: String,
        /// What broke last.
        reason: String,
    },
    /// A server that was ejected answered its probe.
    ServerReadmitted {
        /// Server, without credentials.
        endpoint: String,
    },
    /// The limiter changed how many requests may be out at a server.
    LimitChanged {
        /// Server, without credentials.
        endpoint: String,
        /// Before.
        from: u64,
        /// Now.
        to: u64,
        /// Why, in words.
        reason: String,
    },
    /// The disk does not take the records; nothing new is sent until it does.
    DiskBlocked {
        /// In words, with the path.
        reason: String,
    },
    /// The disk takes them again.
    DiskUnblocked,
    /// No new request is sent; those out are finished.
    Draining {
        /// Who asked.
        reason: String,
    },
    /// The requests that are out are given up.
    Aborting {
        /// Who asked.
        reason: String,
    },
    /// The session ended.
    Ended {
        /// Prompts done, earlier sessions included.
        done: u64,
        /// Prompts failed, earlier sessions included.
        failed: u64,
        /// Prompts left for a later session.
        left: u64,
    },
}

impl Event {
    /// One line for a person.
    pub fn sentence(&self) -> String {
        match self {
            Event::Started { planned, already_ended: 0 } => format!("started: {planned} prompts"),
            Event::Started { planned, already_ended } => {
                format!("resumed: {planned} prompts, {already_ended} of them ended in earlier sessions")
            }
            Event::Notice { text } => text.clone(),
            Event::ServerDown { endpoint, reason, others_up: 0 } => {
                format!("paused: {endpoint} is down ({reason}); waiting for it, no prompt is lost")
            }
            Event::ServerDown { endpoint, reason, .. } => {
                format!("{endpoint} is down ({reason}); its prompts go to the other servers")
            }
            Event::ServerUp { endpoint, down_s } => format!("going on: {endpoint} is back after {down_s:.0} s"),
            Event::ServerAdded { endpoint } => format!("{endpoint} joins the run"),
            Event::ServerRemoved { endpoint, reason } => format!("{endpoint} leaves the run: {reason}"),
            Event::ServerEjected { endpoint, reason } => {
                format!("requests to {endpoint} break one after another ({reason}); it is left out for a while")
            }
            Event::ServerReadmitted { endpoint } => format!("{endpoint} answers again"),
            Event::LimitChanged { endpoint, from, to, reason } => {
                format!("limit {from} -> {to} at {endpoint}: {reason}")
            }
            Event::DiskBlocked { reason } => format!("paused: {reason}; going on when the disk takes it"),
            Event::DiskUnblocked => "going on: the disk takes records again".to_owned(),
            Event::Draining { reason } => format!("{reason}: finishing the requests that are out, sending no new ones"),
            Event::Aborting { reason } => {
                format!("{reason}: giving up the requests that are out, saving what is finished")
            }
            Event::Ended { done, failed, left } => format!("ended: {done} done, {failed} failed, {left} left"),
        }
    }

    /// The line for `events.jsonl`, newline included.
    pub fn to_line(&self, at: &str) -> Vec<u8> {
        #[derive(Serialize)]
        struct Line<'a> {
            at: &'a str,
            #[serde(flatten)]
            event: &'a Event,
        }
        let mut line = serde_json::to_vec(&Line { at, event: self }).expect("an event is plain JSON");
        line.push(b'\n');
        line
    }
}
