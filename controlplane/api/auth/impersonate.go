package auth

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Impersonate returns the user as whom a request shall be done: the one that
// its Impersonate-User, -Uid, -Group and -Extra-* headers name, if user may
// impersonate each of these (verb impersonate on users, serviceaccounts,
// uids, groups and userextras), or user itself if there are none. The
// headers are removed, so that nothing behind can act on them. Errors are
// Kubernetes API errors: 400 for headers without a user name, 403 for what
// is not allowed.
//
// The rules are upstream's: a ServiceAccount without groups gets its own,
// everybody but system:anonymous is in system:authenticated unless a group
// says otherwise.
func Impersonate(ctx context.Context, authz Authorizer, user *User, h http.Header) (*User, error) {
	want, extra := wanted(h)
	if want.Name == "" {
		if want.UID != "" || len(want.Groups) > 0 || extra {
			return nil, apierrors.NewBadRequest("a user id, groups or extra information of another user were given (Impersonate-Uid, -Group, -Extra-*) without impersonating a user name (Impersonate-User)")
		}
		return user, nil
	}
	for _, a := range impersonationChecks(user, want) {
		if allowed, reason := authz.Authorize(ctx, a); !allowed {
			return nil, Forbidden(a, reason)
		}
	}
	if ns, _, ok := ServiceAccountOf(want.Name); ok && len(want.Groups) == 0 {
		want.Groups = []string{ServiceAccountsGroup, ServiceAccountsGroup + ":" + ns}
	}
	switch {
	case want.Name == AnonymousUser:
		want.Groups = withGroup(want.Groups, UnauthenticatedGroup)
	case !want.InGroup(UnauthenticatedGroup):
		want.Groups = withGroup(want.Groups, AuthenticatedGroup)
	}
	return want, nil
}

// wanted reads and removes the headers. extra says that there was an extra
// header at all, also one without a value.
func wanted(h http.Header) (want *User, extra bool) {
	want = &User{
		Name: h.Get(authenticationv1.ImpersonateUserHeader), UID: h.Get(authenticationv1.ImpersonateUIDHeader),
		Groups: slices.Clone(h.Values(authenticationv1.ImpersonateGroupHeader)),
	}
	for name, values := range h {
		key, ok := strings.CutPrefix(name, authenticationv1.ImpersonateUserExtraHeaderPrefix)
		if !ok {
			continue
		}
		extra = true
		key = strings.ToLower(key)
		if plain, err := url.PathUnescape(key); err == nil {
			key = plain
		}
		if want.Extra == nil {
			want.Extra = map[string][]string{}
		}
		want.Extra[key] = append(want.Extra[key], values...)
	}
	for name := range h {
		if strings.HasPrefix(name, "Impersonate-") {
			delete(h, name)
		}
	}
	return want, extra
}

// impersonationChecks are the questions to the authorizer, one for each
// thing that is claimed.
func impersonationChecks(user, want *User) []Attributes {
	ask := func(group, resource, name string) Attributes {
		return Attributes{User: user, Verb: "impersonate", APIGroup: group, APIVersion: "v1", Resource: resource, Name: name}
	}
	const authn = authenticationv1.GroupName
	who := ask("", "users", want.Name)
	if ns, name, ok := ServiceAccountOf(want.Name); ok {
		who = ask("", "serviceaccounts", name)
		who.Namespace = ns
	}
	out := []Attributes{who}
	if want.UID != "" {
		out = append(out, ask(authn, "uids", want.UID))
	}
	for _, g := range want.Groups {
		out = append(out, ask("", "groups", g))
	}
	for key, values := range want.Extra {
		for _, v := range values {
			a := ask(authn, "userextras", v)
			a.Subresource = key
			out = append(out, a)
		}
	}
	return out
}

func withGroup(groups []string, group string) []string {
	if slices.Contains(groups, group) {
		return groups
	}
	return append(groups, group)
}
