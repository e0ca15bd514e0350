// Package auth answers two questions about every API request: who asks
// (Authenticator) and whether they may (Authorizer).
//
// Owner and goroutines: none. Everything here is immutable after its
// constructor and safe for concurrent use; the objects it looks at come
// through the Objects interface, from the same immutable snapshots that
// serve reads.
//
// Credentials, in the order in which Union tries them: a client certificate
// whose chain the TLS layer has verified, a bearer token (static admin
// tokens, kept as hashes; ServiceAccount tokens, ES256 JWTs), nothing at
// all. A credential that is present but wrong is refused (401) and never
// falls through to anonymous.
package auth
