package auth

import (
	"context"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// impersonator allows what stands in its list, as "group/resource/sub/ns/name".
type impersonator []string

func (i impersonator) Authorize(_ context.Context, a Attributes) (bool, string) {
	q := strings.Join([]string{a.APIGroup, a.Resource, a.Subresource, a.Namespace, a.Name}, "/")
	return a.Verb == "impersonate" && a.User.Name == "me" && a.Path == "" && slices.Contains(i, q), "not in the list"
}

func TestImpersonate(t *testing.T) {
	may := impersonator{
		"/users///jane", "/users///" + AnonymousUser, "/serviceaccounts//default/robot", "/groups///devs",
		"/groups///" + UnauthenticatedGroup, "authentication.k8s.io/uids///7", "authentication.k8s.io/userextras/example.com/scope//read",
		"authentication.k8s.io/userextras/scopes//a", "authentication.k8s.io/userextras/scopes//b",
	}
	for name, c := range map[string]struct {
		headers string // name=value, by ;
		want    *User
		code    int32
		message string
	}{
		"nothing":      {"Accept=json", &User{Name: "me"}, 0, ""},
		"user":         {"Impersonate-User=jane", &User{Name: "jane", Groups: []string{AuthenticatedGroup}}, 0, ""},
		"other user":   {"Impersonate-User=joe", nil, 403, `users "joe" is forbidden: User "me" cannot impersonate resource "users" in API group "" at the cluster scope: not in the list`},
		"group":        {"Impersonate-User=jane;Impersonate-Group=devs", &User{Name: "jane", Groups: []string{"devs", AuthenticatedGroup}}, 0, ""},
		"other group":  {"Impersonate-User=jane;Impersonate-Group=devs;Impersonate-Group=system:masters", nil, 403, `groups "system:masters" is forbidden`},
		"stranger":     {"Impersonate-User=jane;Impersonate-Group=system:unauthenticated", &User{Name: "jane", Groups: []string{UnauthenticatedGroup}}, 0, ""},
		"anonymous":    {"Impersonate-User=system:anonymous", &User{Name: AnonymousUser, Groups: []string{UnauthenticatedGroup}}, 0, ""},
		"account":      {"Impersonate-User=system:serviceaccount:default:robot", &User{Name: "system:serviceaccount:default:robot", Groups: []string{ServiceAccountsGroup, ServiceAccountsGroup + ":default", AuthenticatedGroup}}, 0, ""},
		"its groups":   {"Impersonate-User=system:serviceaccount:default:robot;Impersonate-Group=devs", &User{Name: "system:serviceaccount:default:robot", Groups: []string{"devs", AuthenticatedGroup}}, 0, ""},
		"else account": {"Impersonate-User=system:serviceaccount:kube-system:robot", nil, 403, `serviceaccounts "robot" is forbidden: User "me" cannot impersonate resource "serviceaccounts" in API group "" in the namespace "kube-system"`},
		"uid":          {"Impersonate-User=jane;Impersonate-Uid=7", &User{Name: "jane", UID: "7", Groups: []string{AuthenticatedGroup}}, 0, ""},
		"other uid":    {"Impersonate-User=jane;Impersonate-Uid=8", nil, 403, `uids.authentication.k8s.io "8" is forbidden`},
		"extra": {"Impersonate-User=jane;Impersonate-Extra-Example.com%2fscope=read;Impersonate-Extra-Scopes=a;Impersonate-Extra-Scopes=b",
			&User{Name: "jane", Groups: []string{AuthenticatedGroup}, Extra: map[string][]string{"example.com/scope": {"read"}, "scopes": {"a", "b"}}}, 0, ""},
		"other extra":   {"Impersonate-User=jane;Impersonate-Extra-Scopes=c", nil, 403, `userextras.authentication.k8s.io "c" is forbidden: User "me" cannot impersonate resource "userextras/scopes"`},
		"group alone":   {"Impersonate-Group=devs", nil, 400, "without impersonating a user name"},
		"uid alone":     {"Impersonate-Uid=7", nil, 400, "without impersonating a user name"},
		"extra alone":   {"Impersonate-Extra-A=b", nil, 400, "without impersonating a user name"},
		"unknown of us": {"Impersonate-User=jane;Impersonate-Else=x", &User{Name: "jane", Groups: []string{AuthenticatedGroup}}, 0, ""},
	} {
		h := http.Header{}
		for _, kv := range strings.Split(c.headers, ";") {
			k, v, _ := strings.Cut(kv, "=")
			h.Add(k, v)
		}
		got, err := Impersonate(t.Context(), may, &User{Name: "me"}, h)
		if c.code != 0 {
			st, ok := err.(apierrors.APIStatus)
			if !ok || st.Status().Code != c.code || !strings.Contains(err.Error(), c.message) {
				t.Errorf("%s: %v, want HTTP %d %s", name, err, c.code, c.message)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(got, c.want) && fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, c.want)
		}
		for k := range h {
			if strings.HasPrefix(k, "Impersonate-") {
				t.Errorf("%s: header %s is still there", name, k)
			}
		}
	}
}
