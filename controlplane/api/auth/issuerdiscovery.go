package auth

import (
	"encoding/json"
	"net/http"
)

// Where others find how ServiceAccount tokens are checked (OpenID Connect
// Discovery 1.0, KEP-1393).
const (
	IssuerConfigurationPath = "/.well-known/openid-configuration"
	IssuerKeysPath          = "/openid/v1/jwks"
)

// issuerPaths are readable by every ServiceAccount, as upstream's cluster
// role system:service-account-issuer-discovery grants it.
var issuerPaths = []string{IssuerConfigurationPath, IssuerConfigurationPath + "/", IssuerKeysPath, IssuerKeysPath + "/"}

// Discovery serves the issuer's configuration and its keys. address is the
// server's own now (host and port), under which the keys are found; a request
// must have passed an Authorizer.
func (is *Issuer) Discovery(address func() string) http.Handler {
	conf := func() []byte {
		b, err := json.Marshal(struct {
			Issuer        string   `json:"issuer"`
			JWKS          string   `json:"jwks_uri"`
			ResponseTypes []string `json:"response_types_supported"`
			SubjectTypes  []string `json:"subject_types_supported"`
			Algorithms    []string `json:"id_token_signing_alg_values_supported"`
		}{is.issuer, "https://" + address() + IssuerKeysPath, []string{"id_token"}, []string{"public"}, []string{"ES256"}})
		if err != nil {
			panic(err) // strings cannot fail
		}
		return b
	}
	jwks := is.JWKS()
	keys := func() []byte { return jwks }
	mux := http.NewServeMux()
	serve := func(path, contentType string, body func() []byte) {
		h := func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			w.Header().Set("Cache-Control", "public, max-age=3600")
			_, _ = w.Write(body()) // the client is gone if this fails
		}
		mux.HandleFunc("GET "+path, h)
		mux.HandleFunc("GET "+path+"/{$}", h)
	}
	serve(IssuerConfigurationPath, "application/json", conf)
	serve(IssuerKeysPath, "application/jwk-set+json", keys)
	return mux
}
