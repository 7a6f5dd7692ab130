//! Plays one rule of a script on a connection.

use std::{io, time::Duration};

use eaglet_serve::http::{LAST_CHUNK, head, push_chunk};

use super::{
    Wire,
    script::{Body, End, Rule},
    serve::{After, Shared, Ticket},
};

/// Carries the rule out.
///
/// # Errors
/// When the client left first.
pub(super) async fn play(shared: &Shared, wire: &mut Wire, rule: &Rule, ticket: &mut Ticket<'_>) -> io::Result<After> {
    pause(wire, rule.delay_ms).await?;
    if rule.reset_before_reply {
        return Ok(After::Reset);
    }
    if rule.is_silent() {
        return Err(wire.peer_gone().await);
    }
    let (mut first, pieces) = render(shared, rule);
    if is_whole(rule) && !is_chunked(rule) {
        ticket.finish();
    }
    let mut rounds = rule.repeat.unwrap_or(1);
    if !first.is_empty() && (pieces.is_empty() || rule.gap_ms > 0) {
        // With gaps the head must be seen before the first piece.
        wire.send(&std::mem::take(&mut first)).await?;
    }
    while rounds != 0 {
        for piece in &pieces {
            let bytes =
                if first.is_empty() { piece.clone() } else { [std::mem::take(&mut first), piece.clone()].concat() };
            wire.send(&bytes).await?;
            pause(wire, rule.gap_ms).await?;
        }
        if pieces.is_empty() {
            break;
        }
        rounds -= i64::from(rounds > 0);
        // An endless reply without gaps must not keep other connections from their turn.
        tokio::task::yield_now().await;
    }
    finish(wire, rule, ticket).await
}

async fn pause(wire: &mut Wire, milliseconds: u64) -> io::Result<()> {
    if milliseconds == 0 {
        return Ok(());
    }
    wire.unless_gone(tokio::time::sleep(Duration::from_millis(milliseconds))).await
}

/// Whether the reply comes to its end.
fn is_whole(rule: &Rule) -> bool {
    matches!(rule.end, End::Ok | End::Close) && rule.repeat.is_none_or(|rounds| rounds >= 0)
}

fn is_chunked(rule: &Rule) -> bool {
    matches!(rule.body, Body::Events(_) | Body::Chunks(_))
}

/// The head, and the pieces of the body as they go on the wire.
fn render(shared: &Shared, rule: &Rule) -> (Vec<u8>, Vec<Vec<u8>>) {
    let chunk = |data: &[u8]| {
        let mut bytes = Vec::new();
        push_chunk(&mut bytes, data);
        bytes
    };
    let pieces = match &rule.body {
        Body::Empty => Vec::new(),
        Body::Text(text) => {
            let length = if is_whole(rule) { text.len() } else { text.len() / 2 };
            vec![text.as_bytes()[..length].to_vec()]
        }
        Body::Events(events) => events.iter().map(|data| chunk(format!("data: {data}\n\n").as_bytes())).collect(),
        Body::Chunks(chunks) => chunks.iter().map(|data| chunk(data)).collect(),
        Body::Wire(pieces) => pieces.clone(),
    };
    (rendered_head(shared, rule), pieces)
}

fn rendered_head(shared: &Shared, rule: &Rule) -> Vec<u8> {
    let length;
    let (content_type, framing) = match &rule.body {
        Body::Wire(_) => return Vec::new(),
        Body::Empty => ("text/plain", ("content-length", "0")),
        Body::Text(text) => {
            length = text.len().to_string();
            let json = text.starts_with(['{', '[']);
            (if json { "application/json" } else { "text/plain; charset=utf-8" }, ("content-length", length.as_str()))
        }
        Body::Events(_) | Body::Chunks(_) => ("text/event-stream; charset=utf-8", ("transfer-encoding", "chunked")),
    };
    let own: Vec<(String, String)> =
        rule.headers.iter().map(|(name, value)| (name.clone(), shared.fill_in(value))).collect();
    let mut headers = vec![framing];
    if !own.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
        headers.push(("content-type", content_type));
    }
    headers.extend(own.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    head(rule.status.unwrap_or(200), &headers)
}

async fn finish(wire: &mut Wire, rule: &Rule, ticket: &mut Ticket<'_>) -> io::Result<After> {
    if is_whole(rule) && is_chunked(rule) {
        ticket.finish();
        wire.send(LAST_CHUNK).await?;
    }
    match rule.end {
        End::Hang => Err(wire.peer_gone().await),
        End::Reset => Ok(After::Reset),
        End::Cut | End::Close => Ok(After::Close),
        End::Ok => Ok(After::Next),
    }
}
