package registry

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// logins are what is tried at an endpoint, in order: the pod's own first, then
// what the operator wrote, then nothing. A mirror never sees a pod's login.
func (s *Session) logins(e endpoint) (out []workload.RegistryCredential) {
	if !e.mirror {
		out = append(out, s.creds...)
	}
	if a := s.c.config.Configs[e.host].Auth; a.Username != "" || a.Token != "" {
		out = append(out, workload.RegistryCredential{Username: a.Username, Password: a.Password, Token: a.Token})
	}
	if len(out) == 0 {
		out = append(out, workload.RegistryCredential{})
	}
	return out
}

// do asks, and logs in where that is wanted. The answer may be a refusal.
func (s *Session) do(ctx context.Context, e endpoint, method, path string, h http.Header) (*http.Response, error) {
	if auth, ok := s.auth[e.base]; ok {
		r, err := s.send(ctx, e, method, path, h, auth)
		if err != nil || r.StatusCode != http.StatusUnauthorized {
			return r, err
		}
		_ = r.Body.Close()
		delete(s.auth, e.base) // a token that ran out
	}
	r, err := s.send(ctx, e, method, path, h, "")
	if err != nil || r.StatusCode != http.StatusUnauthorized {
		return r, err
	}
	challenges := r.Header.Values("WWW-Authenticate")
	denied := refused(e.host, r)
	for i, login := range s.logins(e) {
		auth, err := s.authorize(ctx, e, challenges, login)
		if err != nil {
			var re *Error
			if errors.As(err, &re) && (re.Code == http.StatusUnauthorized || re.Code == http.StatusForbidden) {
				denied = re
				continue
			}
			return nil, err
		}
		if auth == "" {
			continue
		}
		if r, err = s.send(ctx, e, method, path, h, auth); err != nil {
			return nil, err
		}
		if r.StatusCode == http.StatusUnauthorized || r.StatusCode == http.StatusForbidden {
			denied = refused(e.host, r)
			continue
		}
		s.auth[e.base] = auth
		s.personal = s.personal || !e.mirror && i < len(s.creds)
		return r, nil
	}
	return nil, denied
}

func (s *Session) send(ctx context.Context, e endpoint, method, path string, h http.Header, auth string) (*http.Response, error) {
	c, err := s.c.http(e.host)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, method, e.base+"/"+s.repository+path, nil)
	if err != nil {
		return nil, &Error{Host: e.host, Err: err}
	}
	r.Header = h.Clone()
	r.Header.Set("User-Agent", s.c.agent)
	if auth != "" {
		r.Header.Set("Authorization", auth)
	}
	resp, err := c.Do(r)
	if err != nil {
		return nil, &Error{Host: e.host, Err: causeOf(ctx, err)}
	}
	return resp, nil
}

// authorize answers a challenge; "" means that this login cannot.
func (s *Session) authorize(ctx context.Context, e endpoint, challenges []string, login workload.RegistryCredential) (string, error) {
	for _, c := range challenges {
		scheme, params := parseChallenge(c)
		switch scheme {
		case "bearer":
			return s.token(ctx, e, params, login)
		case "basic":
			if login.Username == "" {
				continue
			}
			return basic(login), nil
		}
	}
	return "", nil
}

func basic(l workload.RegistryCredential) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(l.Username+":"+l.Password))
}

// token asks the registry's token server (distribution specification, token
// authentication), or trades an identity token.
func (s *Session) token(ctx context.Context, e endpoint, params map[string]string, login workload.RegistryCredential) (string, error) {
	realm, err := url.Parse(params["realm"])
	if err != nil || realm.Host == "" || realm.Scheme != "https" && (realm.Scheme != "http" || strings.HasPrefix(e.base, "https:")) {
		return "", &Error{Host: e.host, Err: fmt.Errorf("it sends logins to %q, which is no place for them", line(params["realm"]))}
	}
	scope := params["scope"]
	if scope == "" {
		scope = "repository:" + s.repository + ":pull"
	}
	q := url.Values{"service": {params["service"]}, "scope": strings.Fields(scope)}
	var r *http.Request
	if login.Token != "" {
		q.Set("grant_type", "refresh_token")
		q.Set("refresh_token", login.Token)
		q.Set("client_id", "dunlin")
		q.Set("scope", scope)
		r, err = http.NewRequestWithContext(ctx, http.MethodPost, realm.String(), strings.NewReader(q.Encode()))
		if err == nil {
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		}
	} else {
		for k, v := range realm.Query() {
			q[k] = append(q[k], v...)
		}
		realm.RawQuery = q.Encode()
		r, err = http.NewRequestWithContext(ctx, http.MethodGet, realm.String(), nil)
		if err == nil && login.Username != "" {
			r.Header.Set("Authorization", basic(login))
		}
	}
	if err != nil {
		return "", &Error{Host: realm.Host, Err: err}
	}
	return s.askToken(ctx, realm.Host, r)
}

func (s *Session) askToken(ctx context.Context, host string, r *http.Request) (string, error) {
	c, err := s.c.http(host)
	if err != nil {
		return "", err
	}
	r.Header.Set("User-Agent", s.c.agent)
	resp, err := c.Do(r)
	if err != nil {
		return "", &Error{Host: host, Err: causeOf(ctx, err)}
	}
	if resp.StatusCode != http.StatusOK {
		return "", refused(host, resp)
	}
	defer func() { _ = resp.Body.Close() }()
	var t struct {
		Token       string `json:"token"`
		AccessToken string `json:"access_token"`
	}
	const most = 1 << 20
	if err := json.NewDecoder(io.LimitReader(resp.Body, most)).Decode(&t); err != nil {
		return "", &Error{Host: host, Err: errors.New("its token server sent no token")}
	}
	if t.Token == "" {
		t.Token = t.AccessToken
	}
	if t.Token == "" {
		return "", &Error{Host: host, Err: errors.New("its token server sent no token")}
	}
	return "Bearer " + t.Token, nil
}

// parseChallenge reads one WWW-Authenticate header (RFC 9110, 11.6.1).
func parseChallenge(s string) (scheme string, params map[string]string) {
	scheme, rest, _ := strings.Cut(strings.TrimSpace(s), " ")
	params = map[string]string{}
	for rest = strings.TrimSpace(rest); rest != ""; rest = strings.TrimLeft(rest, ", ") {
		key, after, ok := strings.Cut(rest, "=")
		if !ok {
			break
		}
		var value string
		if strings.HasPrefix(after, `"`) {
			value, rest = quoted(after[1:])
		} else {
			value, rest, _ = strings.Cut(after, ",")
		}
		params[strings.ToLower(strings.TrimSpace(key))] = value
	}
	return strings.ToLower(scheme), params
}

func quoted(s string) (value, rest string) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '\\' && i+1 < len(s):
			i++
			b.WriteByte(s[i])
		case s[i] == '"':
			return b.String(), s[i+1:]
		default:
			b.WriteByte(s[i])
		}
	}
	return b.String(), ""
}
