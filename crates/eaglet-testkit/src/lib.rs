//! What eaglet's tests stand on: a scripted inference server and storage that fails on purpose. Never published.

#![allow(clippy::unwrap_used, reason = "test support: a panic is the report")]

pub mod faulty_storage;
pub mod server;
